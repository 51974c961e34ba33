"""Prompts to tokens, tokens to text, and rules over logits."""
