"""Prompts to tokens, tokens to text, rules over logits, and structured outputs."""
