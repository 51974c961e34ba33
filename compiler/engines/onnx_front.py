"""The front end that reads ONNX graphs with TensorRT's own parser."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import onnx_ir as ir

from outrider.compiler.engines.onnx_file import WeightFile, write_graph
from outrider.compiler.engines.tensorrt_network import carry_bits
from outrider.plans.errors import PlanError


class OnnxFront:
    """Reads the lowered graph, so it can serve every engine."""

    name = "onnx"

    def __init__(self, trt: Any, log: Any) -> None:
        self._trt, self._log = trt, log

    def reason_against(self, model: ir.Model) -> str | None:
        return None

    def fill(self, engine: str, model: ir.Model, network: Any, workplace: Path) -> Any:
        carry_bits(engine, model)
        with closing(WeightFile(workplace)) as weights:
            write_graph(model, workplace / "graph.onnx", weights, inlined=True)
        parser = self._trt.OnnxParser(network, self._log)
        if not parser.parse_from_file(str(workplace / "graph.onnx")):
            said = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
            raise PlanError(f"engine {engine}: TensorRT cannot read its graph: {said or self._log.said()}")
        return parser
