"""Faults under load, and what becomes of requests: `python -m outrider.tools.lab.faults PLAN`."""
