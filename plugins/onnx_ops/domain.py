"""Where our graph ops live in ONNX."""

from __future__ import annotations

DOMAIN = "outrider"
VERSION = 1
OPSET = 24  # the standard opset of the function bodies: the first with TensorScatter
