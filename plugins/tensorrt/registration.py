"""Register plugins with TensorRT: for each plugin, a description of its outputs, and its launch.

TensorRT calls these functions when it builds an engine, and keeps the kernels and formulas of sizes that they return;
an engine runs without the functions. Nothing is autotuned: each plugin has one kernel, and one type and layout for each
of its tensors, which TensorRT assumes by default.
"""

from __future__ import annotations

import importlib
from functools import cache
from inspect import Parameter, Signature
from types import GenericAlias
from typing import Any

from outrider.plugins.schema import TensorSpec
from outrider.plugins.tensorrt.compile import compile_plugin
from outrider.plugins.tensorrt.expressions import Arithmetic
from outrider.plugins.tensorrt.plugin import BITS, Plugin, carried_as
from outrider.plugins.tensorrt.table import DISTINCT


@cache
def register_plugins() -> None:
    """Register every plugin with TensorRT in this process; to be called before an ONNX graph is parsed.

    Raises ImportError where TensorRT 10.15 or later is missing.
    """
    try:
        trt, trtp = (importlib.import_module(name) for name in ("tensorrt", "tensorrt.plugin"))
    except ImportError as error:
        raise ImportError(
            f"plugins are for TensorRT 10.15 or later, whose package `tensorrt` cannot be loaded ({error})"
        ) from None
    if not hasattr(trtp, "KernelLaunchParams"):
        raise ImportError(
            f"plugins are for TensorRT 10.15 or later; {trt.__version__} cannot compile Python plugins ahead of time"
        )
    for plugin in DISTINCT:
        register(plugin, trt, trtp)


def register(plugin: Plugin, trt: Any, trtp: Any) -> None:
    """Register one plugin with the modules `tensorrt` and `tensorrt.plugin`."""
    tensors = [_parameter(spec.name, trtp.TensorDesc) for spec in plugin.inputs]
    attributes = [_parameter(name, plugin.kind(name)) for name in plugin.attributes]
    outputs = GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.outputs))
    arithmetic = Arithmetic[Any](constant=trtp.ShapeExpr, ceil_quotient=trtp.cdiv)
    positions = {spec.name: index for index, spec in enumerate(plugin.inputs)}

    def describe(*inputs: Any, **given: int | float) -> tuple[Any, ...]:
        _check_types(plugin, inputs, trt)
        sizes: dict[str, Any] = plugin.sizes([descriptor.shape_expr for descriptor in inputs]) | given
        described = []
        for spec, shape in zip(plugin.outputs, plugin.output_shapes(sizes, arithmetic), strict=True):
            if spec.name in plugin.aliased:
                described.append(inputs[positions[plugin.aliased[spec.name]]].aliased())
            else:
                described.append(trtp.from_shape_expr(shape, getattr(trt, carried_as(spec)[0])))
        return tuple(described)

    def implement(*given: Any) -> tuple[str, str, Any, Any]:
        inputs = given[: len(tensors)]
        known = dict(zip(plugin.attributes, given[len(tensors) : len(tensors) + len(attributes)], strict=True))
        launch = plugin.launch_for(known | _constants(plugin, inputs))
        sizes: dict[str, Any] = plugin.sizes([descriptor.shape_expr for descriptor in inputs])
        arguments = trtp.SymIntExprs(len(launch.arguments))
        for index, argument in enumerate(launch.arguments):
            arguments[index] = trtp.SymInt32(argument.value(sizes, arithmetic))
        parameters = trtp.KernelLaunchParams(grid_x=launch.blocks.value(sizes, arithmetic), block_x=launch.threads)
        return plugin.kernel, compile_plugin(plugin), parameters, arguments

    # TensorRT reads a plugin's inputs and attributes from the functions' signatures.
    describe.__signature__ = Signature([*tensors, *attributes], return_annotation=outputs)  # type: ignore[attr-defined]
    implement.__signature__ = Signature(  # type: ignore[attr-defined]
        [*tensors, *attributes, _parameter("outputs", outputs), _parameter("tactic", int)],
        return_annotation=tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs],
    )
    trtp.register(plugin.id)(describe)
    trtp.aot_impl(plugin.id)(implement)


def _parameter(name: str, kind: Any) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)


def _check_types(plugin: Plugin, inputs: tuple[Any, ...], trt: Any) -> None:
    """Raise ValueError for an input whose type is not the plugin's."""
    for spec, descriptor in zip(plugin.inputs, inputs, strict=True):
        if descriptor.dtype not in [getattr(trt, dtype) for dtype in carried_as(spec)]:
            raise ValueError(f"{plugin.id} takes {spec.name} as {_spelled(spec)}, not {descriptor.dtype}")


def _spelled(spec: TensorSpec) -> str:
    bits = f" (the bits of {spec.dtype})" if spec.dtype in BITS else ""
    return " or ".join(carried_as(spec)) + bits


def _constants(plugin: Plugin, inputs: tuple[Any, ...]) -> dict[str, int]:
    """Return the sizes that are fixed when the engine is built. Raises ValueError where a size is unknown then."""
    constants: dict[str, int] = {}
    for symbol in plugin.constants:
        index, axis = plugin.axes[symbol]
        constants[symbol] = inputs[index].shape[axis]
        if constants[symbol] < 0:
            raise ValueError(f"{plugin.id} needs a fixed {symbol}: axis {axis} of {plugin.inputs[index].name}")
        constants["itemsize"] = inputs[index].dtype.itemsize
    return constants
