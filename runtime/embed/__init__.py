"""The C library: `python -m outrider.runtime embed`."""
