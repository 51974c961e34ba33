"""The commands of `python -m outrider.runtime`."""
