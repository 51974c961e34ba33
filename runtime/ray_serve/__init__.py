"""The server on Ray Serve: replicas of a plan behind one address. `python -m runtime.ray_serve PLAN`."""
