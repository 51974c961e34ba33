"""`python -m outrider.tools.serving`: what a prefix cache and shared passes bring."""
