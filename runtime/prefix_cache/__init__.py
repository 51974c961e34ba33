"""KV of earlier sequences, found by their tokens."""
