"""KV caches: which slot holds which token, and which cache a pass reads."""
