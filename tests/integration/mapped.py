"""Whether weights of an engine stay where its file is mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import onnx

PAGE = 4096


def mapped(plan: Path, weights: Callable[[onnx.NodeProto], Iterable[str]]) -> int:
    """Assert that the `weights` of the target's nodes lie in pages of the plan's file; return how many these are."""
    folder = plan / "engines" / "onnxruntime-cpu"
    graph = onnx.load(folder / "target.onnx", load_external_data=False).graph
    names = {name for node in graph.node for name in weights(node)}
    lies = [{e.key: e.value for e in tensor.external_data} for tensor in graph.initializer if tensor.name in names]
    pages = set[int]()  # of the file
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith(str(folder / "weights.bin")):
            places, _, offset, *_ = line.split()
            first, end = (int(place, 16) for place in places.split("-"))
            pages |= {int(offset, 16) + page for page in range(0, end - first, PAGE)}
    assert len(lies) == len(names)
    for tensor in lies:
        begin = int(tensor["offset"])
        assert begin % PAGE == 0
        assert {begin + page for page in range(0, int(tensor["length"]), PAGE)} <= pages
    return len(lies)
