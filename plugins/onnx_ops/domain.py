"""The ONNX domain of our graph ops."""

from __future__ import annotations

DOMAIN = "outrider"
VERSION = 1
OPSET = 24  # the standard opset of the function bodies: the first with TensorScatter
