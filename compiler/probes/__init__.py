"""Graphs that show whether a row of an op's result depends on that row of its inputs alone."""
