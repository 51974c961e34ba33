"""The server on Ray Serve: replicas of a plan behind one address. `python -m outrider.runtime.ray_serve PLAN`."""
