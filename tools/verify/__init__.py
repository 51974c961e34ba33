"""Whether a plan says what its checkpoint says: `python -m tools.verify`."""
