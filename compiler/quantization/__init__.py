"""Quantised weights: their form, how they are rounded, and where they enter a graph."""
