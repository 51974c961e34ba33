"""Writing an engine for ONNX Runtime: one `.onnx` file, its large weights in a file that engines share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from plans import names
from plans.buffers import DType, Tensor
from plans.manifest import Engine

_INLINE = 1024  # bytes: smaller constants stay in the graph, where optimisers can see them
_ALIGNMENT = 4096  # bytes: so that the file can be mapped page by page

DTYPES = {
    ir.DataType.FLOAT: DType.FLOAT32,
    ir.DataType.DOUBLE: DType.FLOAT64,
    ir.DataType.FLOAT16: DType.FLOAT16,
    ir.DataType.BFLOAT16: DType.BFLOAT16,
    ir.DataType.INT64: DType.INT64,
    ir.DataType.INT32: DType.INT32,
}


class WeightFile:
    """`weights.bin` of one execution target. Equal tensors of any engine are stored once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "weights.bin"
        self._file = self.path.open("wb")
        self._offsets: dict[bytes, int] = {}

    def add(self, data: bytes) -> int:
        """Offset in bytes of `data` in the file."""
        key = hashlib.sha256(data).digest()
        if key not in self._offsets:
            self._file.seek(-self._file.tell() % _ALIGNMENT, 1)
            self._offsets[key] = self._file.tell()
            self._file.write(data)
        return self._offsets[key]

    def close(self) -> None:
        self._file.close()


def write_engine(model: ir.Model, folder: Path, name: str, weights: WeightFile) -> Engine:
    """Write `folder/name.onnx` and describe it; cache outputs are aliases of cache inputs."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _INLINE:
            continue
        data = np.ascontiguousarray(tensor.numpy()).tobytes()
        value.const_value = ir.ExternalTensor(
            weights.path.name, weights.add(data), len(data), tensor.dtype,
            shape=ir.Shape(tensor.numpy().shape), name=value.name or "", base_dir=folder,
        )  # fmt: skip
    proto = ir.to_proto(model)
    path = folder / f"{name}.onnx"
    path.write_bytes(proto.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(path), full_check=False)
    inputs = tuple(_tensor(value) for value in model.graph.inputs)
    outputs = tuple(_tensor(value) for value in model.graph.outputs)
    cached = {names.cache_output(tensor.name) for tensor in inputs}
    aliases = {o.name: o.name.partition("_out")[0] for o in outputs if o.name.partition("_out")[0] + "_out" in cached}
    return Engine(
        file=f"engines/{folder.name}/{path.name}",
        inputs=inputs,
        outputs=outputs,
        aliases=aliases,
        weight_bytes=sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None),
    )


def _tensor(value: ir.Value) -> Tensor:
    assert value.name
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
    return Tensor(name=value.name, dtype=DTYPES[value.dtype], shape=shape)
