"""Which draft tree pays on this machine: `python -m tools.tune`."""
