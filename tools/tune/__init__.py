"""Which draft tree pays on this machine: `python -m outrider.tools.tune`."""
