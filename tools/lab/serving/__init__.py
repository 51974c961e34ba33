"""`python -m outrider.tools.lab.serving`: what a prefix cache and shared passes bring."""
