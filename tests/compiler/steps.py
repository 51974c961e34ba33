"""What the tests of graphs share: steps of several rows, and engines of ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from outrider.compiler.engines.onnxruntime import OnnxRuntimeEngines
from outrider.compiler.lowering import group_query_attention
from outrider.compiler.lowering.builder import around
from outrider.plans.manifest import Engine
from tests.cpu_session import cpu_session

Arrays = dict[str, NDArray[Any]]


def flat(parents: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Parents within each row as parents in the step."""
    starts = np.cumsum([0, *(len(parent) for parent in parents[:-1])])
    return np.concatenate([np.where(p < 0, -1, p + start) for p, start in zip(parents, starts, strict=True)])


def depths(parents: Sequence[int] | NDArray[np.int64], first: int) -> list[int]:
    """Positions of the new tokens of a row whose roots are at `first`."""
    found: list[int] = []
    for parent in parents:
        found.append(first if parent < 0 else found[parent] + 1)
    return found


def write_engine(graph: ir.Model, folder: Path, name: str = "target") -> Engine:
    folder.mkdir(parents=True, exist_ok=True)
    engines = OnnxRuntimeEngines(folder)
    engine = engines.write(name, graph, {})
    engines.close()
    return engine


def run_engine(file: Path, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
    """Outputs by name; `feeds` may have more than the graph's inputs."""
    session = cpu_session(file)
    known = {each.name for each in session.get_inputs()}
    outputs = [each.name for each in session.get_outputs()]
    return dict(zip(outputs, session.run(None, {n: v for n, v in feeds.items() if n in known}), strict=True))


CUDA = "onnxruntime-cuda"
_Q_NORM, _K_NORM = 14, 15


def in_float32(patch: pytest.MonkeyPatch) -> None:
    """Lower float32 as the CUDA provider's types are lowered: the CPU provider has the kernel."""
    patch.setattr(group_query_attention, "KERNELS", (*group_query_attention.KERNELS, ir.DataType.FLOAT))


def norms_outside(patch: pytest.MonkeyPatch) -> None:
    """Leave norms of queries and keys, and the rotation after them, out of the node: the CPU provider has no norms."""
    rotates = group_query_attention.rotates
    patch.setattr(group_query_attention, "rotates", lambda node, cos: around(node)[4] is None and rotates(node, cos))


def spell_norms_out(path: Path) -> int:
    """Write the norms inside a model's GroupQueryAttention nodes as nodes of their own, by the op's definition: RMS
    norms of each head's query and key, before the rotation. Return how many nodes had some.
    """
    model = onnx.load(path, load_external_data=False)
    nodes, changed = [], 0
    for index, node in enumerate(model.graph.node):
        if node.op_type != "GroupQueryAttention" or len(node.input) <= _K_NORM:
            nodes.append(node)
            continue
        assert not node.input[1], "the node takes q, k and v packed"
        changed += 1
        own = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        heads, kv_heads = own["num_heads"], own["kv_num_heads"]
        (weight,) = [each for each in model.graph.initializer if each.name == node.input[_Q_NORM]]
        head_dim = weight.dims[0]
        sizes = np.array([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
        name = f"spelled.{index}"
        for suffix, array in (("sizes", sizes), ("split", [0, 0, -1, head_dim]), ("flat", [0, 0, -1])):
            model.graph.initializer.append(numpy_helper.from_array(np.array(array, np.int64), f"{name}.{suffix}"))
        parts = [f"{name}.{part}" for part in "qkv"]
        nodes.append(helper.make_node("Split", [node.input[0], f"{name}.sizes"], parts, axis=-1))
        for place, weight_index in ((0, _Q_NORM), (1, _K_NORM)):
            part = parts[place]
            nodes += [
                helper.make_node("Reshape", [part, f"{name}.split"], [f"{part}.heads"]),
                helper.make_node(
                    "RMSNormalization",
                    [f"{part}.heads", node.input[weight_index]],
                    [f"{part}.normed"],
                    epsilon=own["qk_norm_epsilon"],
                    axis=-1,
                ),
                helper.make_node("Reshape", [f"{part}.normed", f"{name}.flat"], [f"{part}.out"]),
            ]
            parts[place] = f"{part}.out"
        node.input[:3] = parts
        del node.input[11:]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
    return changed
