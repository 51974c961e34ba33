"""Prompts to tokens, tokens to text, and constrained decoding."""
