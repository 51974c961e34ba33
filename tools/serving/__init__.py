"""`python -m tools.serving`: what a prefix cache and shared passes bring."""
