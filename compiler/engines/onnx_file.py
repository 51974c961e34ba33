"""Write graphs as `.onnx` files, with large weights in a file that several graphs may share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir

from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.manifest import Engine

Bytes = bytes | memoryview
_INLINE = 1024  # bytes: smaller constants stay in the graph, where optimisers can see them
_BY_RECTANGLE = ("TensorScatter", "GroupQueryAttention")
_ALIGNMENT = 4096  # bytes: tensors begin at pages, so that the file can be mapped

DTYPES = {
    ir.DataType.FLOAT: DType.FLOAT32,
    ir.DataType.DOUBLE: DType.FLOAT64,
    ir.DataType.FLOAT16: DType.FLOAT16,
    ir.DataType.BFLOAT16: DType.BFLOAT16,
    ir.DataType.INT8: DType.INT8,
    ir.DataType.INT64: DType.INT64,
    ir.DataType.INT32: DType.INT32,
    ir.DataType.UINT64: DType.UINT64,
}


class WeightFile:
    """`weights.bin` of a folder. Equal tensors of any graph are stored once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "weights.bin"
        self._file = self.path.open("wb")
        self._offsets: dict[bytes, int] = {}

    def add(self, data: Bytes) -> int:
        """Store `data` unless the file has it, and return its offset in bytes."""
        key = hashlib.sha256(data).digest()
        if key not in self._offsets:
            self._file.seek(-self._file.tell() % _ALIGNMENT, 1)
            self._offsets[key] = self._file.tell()
            self._file.write(data)
        return self._offsets[key]

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def write_graph(model: ir.Model, path: Path, weights: WeightFile, *, inlined: bool = False) -> None:
    """Write `model` to `path`, beside its weights.

    `inlined` replaces function calls by their bodies, for TensorRT's parser, which may know plugins that are called
    like our ops and take more inputs. ONNX's checker runs on graphs that are not inlined; the parser checks for itself.
    """
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _INLINE:
            continue
        data = _bytes_of(tensor)
        value.const_value = ir.ExternalTensor(
            weights.path.name, weights.add(data), len(data), tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()), name=value.name or "", base_dir=path.parent,
        )  # fmt: skip
    proto = ir.to_proto(model)
    if inlined:
        proto = onnx.inliner.inline_local_functions(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))
    if not inlined:
        onnx.checker.check_model(str(path), full_check=False)


def _bytes_of(tensor: ir.TensorProtocol) -> Bytes:
    """Read a tensor as bytes, two numbers of 4 bits in one; without a copy where its array has them."""
    if tensor.dtype.bitwidth < 8:
        return tensor.tobytes()
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def describe_engine(model: ir.Model, file: str) -> Engine:
    """Describe the engine of `model` in `file`, a path in the plan; cache outputs are aliases of cache inputs."""
    inputs = tuple(_tensor(value) for value in model.graph.inputs)
    outputs = tuple(_tensor(value) for value in model.graph.outputs)
    cached = {names.cache_output(tensor.name) for tensor in inputs}
    aliases = {o.name: o.name.partition("_out")[0] for o in outputs if o.name.partition("_out")[0] + "_out" in cached}
    return Engine(
        file=file,
        inputs=inputs,
        outputs=outputs,
        aliases=aliases,
        rectangular=_rectangular(model),
        weight_bytes=sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None),
    )


def _rectangular(model: ir.Model) -> bool:
    """Whether several rows append to a KV cache by an op that takes as many slots of each of them."""
    several = any(
        (value.name or "").startswith(names.k_cache(0))
        and value.shape is not None
        and not isinstance(value.shape[0], int)
        for value in model.graph.inputs
    )
    graphs = (model.graph, *model.functions.values())
    return several and any(node.op_type in _BY_RECTANGLE for graph in graphs for node in graph)


def _tensor(value: ir.Value) -> Tensor:
    assert value.name
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
    return Tensor(name=value.name, dtype=DTYPES[value.dtype], shape=shape)
