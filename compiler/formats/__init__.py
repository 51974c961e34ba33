"""Checkpoints of other formats than safetensors of floats: their files, configurations, tokenizers and tensors."""
