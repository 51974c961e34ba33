"""The front end that reads PyTorch programs with Torch-TensorRT's converters and ours.

The program is the one that the ONNX graph was made from; names, rows and outputs are those of the lowered graph.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from outrider.compiler.engines.onnx_file import DTYPES
from outrider.compiler.engines.tensorrt_network import TYPES
from outrider.compiler.engines.torch_converters import OneRowConverters, attend_alone, is_plain
from outrider.compiler.engines.torch_tensorrt import load_torch_tensorrt, using_its_tensorrt
from outrider.compiler.export.ops import branch_attention
from outrider.compiler.export.tracing import TracedProgram, traced_of
from outrider.compiler.models.ops import COMPOSITES
from outrider.plans.errors import PlanError
from outrider.plugins.schema import QUANT_OPS

_OURS = "outrider"


class TorchFront:
    """Reads graphs whose ops Torch-TensorRT or we convert: target graphs, not draft graphs."""

    def __init__(self, trt: Any, log: Any) -> None:
        """Raise `PlanError` where Torch-TensorRT for the package `trt` is missing."""
        self._trt, self._log = trt, log
        self.name = f"torch_tensorrt {load_torch_tensorrt(trt.__name__).__version__}"

    def reason_against(self, model: ir.Model) -> str | None:
        """Decline graphs with ops of ours that have no converter; any other op without a converter fails in `fill`."""
        if any(node.op_type in QUANT_OPS for node in model.graph):
            return f"{self.name} reads the program before its weights are quantised"
        nodes = [node for node in traced_of(model).program.graph.nodes if node.op == "call_function"]
        if any(not is_plain(node) for node in nodes if node.target is branch_attention):
            return f"{self.name} has no converter of attention with capped scores, sinks or windows"
        targets = {node.target for node in nodes}
        lacking = sorted(
            str(target).split(".")[1]
            for target in targets - OneRowConverters.OPS - COMPOSITES.keys()
            if str(target).startswith(f"{_OURS}.")
        )
        return f"{self.name} has no converter of {', '.join(lacking)}" if lacking else None

    def fill(self, engine: str, model: ir.Model, network: Any, workplace: Path) -> Any:
        with using_its_tensorrt(), warnings.catch_warnings():  # not safe for two threads at once
            warnings.simplefilter("ignore")  # Torch-TensorRT and PyTorch warn of each other's deprecations
            self._log.clear()
            try:
                return self._fill(model, network)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                said = " ".join(str(error).partition("While executing")[0].split()) or type(error).__name__
                raise PlanError(
                    f"engine {engine}: {self.name} cannot convert it: {said} (TensorRT: {self._log.said()}); leave "
                    "frontend at onnx"
                ) from error

    def _fill(self, model: ir.Model, network: Any) -> Any:
        from torch_tensorrt import Device
        from torch_tensorrt.dynamo._settings import CompilationSettings
        from torch_tensorrt.dynamo.conversion._ConversionContext import ConversionContext
        from torch_tensorrt.dynamo.lowering import get_decompositions, post_lowering, pre_export_lowering

        settings = CompilationSettings(
            device=Device(gpu_id=0),
            assume_dynamic_shape_support=True,
            disable_tf32=True,
            immutable_weights=True,
        )
        traced, own = traced_of(model), COMPOSITES | {branch_attention: attend_alone}
        program = pre_export_lowering(traced.materialised(), settings).run_decompositions(get_decompositions() | own)
        context = ConversionContext(network, settings)
        walk = _Walk(post_lowering(program.module(), settings), context, self._trt, model, traced)
        walk.run(enable_io_processing=False)
        return walk


class _Walk(fx.Interpreter):
    """Runs a program on tensors of a network; every op adds its layers to the network."""

    def __init__(self, module: fx.GraphModule, context: Any, trt: Any, model: ir.Model, traced: TracedProgram) -> None:
        super().__init__(module)
        from torch_tensorrt.dynamo.conversion._ConverterRegistry import DYNAMO_CONVERTERS

        DYNAMO_CONVERTERS.set_compilation_settings(context.compilation_settings)
        self._converters, self._context, self._trt = DYNAMO_CONVERTERS, context, trt
        self._model, self._traced = model, traced
        self._own = OneRowConverters(trt, context)
        self._inputs = iter(traced.inputs)
        self._node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = self._context.current_node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Add the network's input; None for an input that the lowered graph does not read, as the splits of one row."""
        assert self._node is not None
        if not isinstance(self._node.meta.get("val"), torch.Tensor):
            return None
        name = next(self._inputs)
        value = next((v for v in self._model.graph.inputs if v.name == name), None)
        if value is None:
            return None
        assert value.shape is not None
        assert value.dtype is not None
        shape = [d if isinstance(d, int) else -1 for d in value.shape]
        dtype = getattr(self._trt.DataType, TYPES[DTYPES[value.dtype].value])
        return self._context.net.add_input(name, dtype, shape)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        constant = super().get_attr(target, args, kwargs)
        return constant.data if isinstance(constant, torch.nn.Parameter) else constant

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        assert self._node is not None
        if target is operator.getitem:
            return args[0][args[1]]
        own: Callable[..., Any] | None = self._own.converter(target)
        if own is not None:
            return own(*args, **kwargs)
        found = self._converters.get(self._node)
        if found is None:
            raise NotImplementedError(f"it has no converter of {target}")
        return found[0](self._context, target, args, kwargs, self._node.name)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        kept = {value.name for value in self._model.graph.outputs}
        for name, tensor in zip(self._traced.outputs, args[0], strict=True):
            if name in kept:
                tensor.name = name
                self._context.net.mark_output(tensor)
        return None
