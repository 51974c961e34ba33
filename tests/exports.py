"""Exports that tests share: most plans of the tests are made of the same few graphs, and an export takes seconds.

The first test that needs a graph exports it, and the others, in any process, read it: by the module with its
settings, the example inputs and the names of the outputs. What becomes of a graph is not shared, nor are weights that
stay in the checkpoint: a graph has those of the module that it is asked for.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.utils._pytree import tree_map

from outrider import compiler, plans, plugins
from outrider.compiler.deferred import Deferred, deferred, stored_of
from outrider.compiler.export import tracing
from tests.compiler import attention_forms

Once = Callable[[str, Callable[[Path], object]], Path]


def sources_digest() -> str:
    """What a graph depends on beside its module's settings: our code that makes graphs, and the versions below it."""
    folders = [Path(package.__file__).parent for package in (compiler, plans, plugins) if package.__file__]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    digest = hashlib.sha256("".join(version(name) for name in ("torch", "onnxscript", "onnx-ir")).encode())
    for file in [*files, Path(__file__), Path(attention_forms.__file__)]:
        digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class SharedExports:
    """`trace` of `compiler.export.tracing`, which exports what no test has asked for before."""

    def __init__(self, once: Once) -> None:
        """`once` makes a file of a name where no process has made it yet, and returns where it is."""
        self._once = once

    def __call__(
        self, module: torch.nn.Module, inputs: Mapping[str, Any], dynamic: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> ir.Model:
        def export() -> ir.Model:
            return tracing.trace(module, inputs, dynamic, outputs)

        file = self._once(
            f"export-{_key(module, _shapes(inputs), dynamic, outputs)}", lambda file: ir.save(export(), file)
        )
        model = ir.from_proto(ir.to_proto(ir.load(file)))  # its weights in memory: another test may remove the file
        tracing.put_weights(model, deferred(module))
        model.graph.meta[tracing.TRACED] = _TracedLater(export, tuple(outputs))
        return model


class _TracedLater(tracing.TracedProgram):
    """The program, which few need, is exported when it is asked for."""

    def __init__(self, export: Callable[[], ir.Model], outputs: tuple[str, ...]) -> None:
        self._export, self.inputs, self.outputs = export, (), outputs

    @cached_property
    def _traced(self) -> tracing.TracedProgram:
        return tracing.traced_of(self._export())

    @property
    def program(self) -> torch.export.ExportedProgram:  # type: ignore[override]
        return self._traced.program

    @property
    def weights(self) -> Mapping[str, Deferred]:  # type: ignore[override]
        return self._traced.weights


def _key(*parts: Any) -> str:
    written = io.BytesIO()
    _Pickler(written).dump(parts)
    return hashlib.sha256(written.getvalue()).hexdigest()[:32]


def _shapes(inputs: Mapping[str, Any]) -> Any:
    """Examples are of some shape, and hold anything."""
    return tree_map(
        lambda value: (value.dtype, value.shape) if isinstance(value, torch.Tensor) else value, dict(inputs)
    )


class _Pickler(pickle.Pickler):
    """Tensors by what they hold, where a graph may depend on it; a pickle of a tensor says where it lay as well. The
    same in any process."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, set | frozenset):  # its order is another in each process
            return "set", sorted(value, key=repr)
        if not isinstance(value, torch.Tensor):
            return None
        stored = stored_of(value)
        if stored is not None and not tracing.is_compared(stored):
            return str(value.dtype), tuple(value.shape), type(stored).__name__
        value = value if stored is None else stored.read()
        held = value.detach().contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else b""
        return str(value.dtype), tuple(value.shape), hashlib.sha256(held).hexdigest()
