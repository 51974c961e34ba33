"""PyTorch modules to ONNX, with our ops as nodes of domain `outrider`; independent of backends."""

from compiler.export.draft import export_draft
from compiler.export.target import export_target

__all__ = ["export_draft", "export_target"]
