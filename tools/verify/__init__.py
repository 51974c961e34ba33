"""Whether a plan says what its checkpoint says: `python -m outrider.tools.verify`."""
