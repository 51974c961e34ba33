"""The server on Ray Serve: replicas of a plan after one address. `python -m outrider.runtime.ray_serve PLAN`."""
