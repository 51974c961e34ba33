"""Plan to tokens. No PyTorch, no compiler."""
