"""A plan's programs, run on a session's buffers."""
