"""The C library: `python -m runtime embed`."""
