"""Faults under load, and what becomes of requests: `python -m tools.faults PLAN`."""
