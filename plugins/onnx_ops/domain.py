"""The ONNX domain of our graph ops, and its versions."""

from __future__ import annotations

DOMAIN = "outrider"
VERSION = 1
OPSET = 24  # the standard opset of the function bodies, the first opset with TensorScatter
