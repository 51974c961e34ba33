"""PyTorch modules to ONNX, with our ops as nodes of domain `outrider`; independent of backends."""

from outrider.compiler.export.draft import export_draft
from outrider.compiler.export.draft_graph import DraftOptions
from outrider.compiler.export.target import export_target

__all__ = ["DraftOptions", "export_draft", "export_target"]
