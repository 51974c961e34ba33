"""The commands of `python -m runtime`."""
