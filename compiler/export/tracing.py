"""Trace a module into a graph that holds nothing but its computation."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from onnxscript import rewriter
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from outrider.compiler.deferred import Deferred, deferred
from outrider.compiler.export.ops import TRANSLATIONS
from outrider.plans import names
from outrider.plugins.onnx_ops import OPSET

Shape = Sequence[int | str]
TRACED = "outrider.traced"
_REWRITES = (
    None, "MaterializeReshapeShape", "CastCast", "CastIdentity", "ExpandIdentity", "Flatten2Reshape", "ReshapeReshape",
    "SqueezeReshape1d", "TransposeIdentity", "TransposeTranspose", "UnsqueezeUnsqueeze",
)  # fmt: skip
"""The optimiser's rules, by name, that have to do with our graphs: those without one are of arithmetic that changes
nothing, and of reshaped products."""
_COMPARED = 1024  # numbers of the largest constants that the optimiser compares, to merge equal ones
_REAL = {names.ATTN_BIAS, names.FEATURES, names.NOISE, names.DRAFT_SAMPLING}  # inputs in float32; others are int64


@dataclass
class TracedProgram:
    """The program that a graph was made from, with the contract's names of its inputs and outputs, in its order.

    Parameters of `program` that have no values yet are read from `weights`.
    """

    program: torch.export.ExportedProgram
    weights: Mapping[str, Deferred]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def materialised(self) -> torch.export.ExportedProgram:
        """Return the program with all its weights read, for a builder that reads the program itself."""
        program = self.program
        read = {
            name: nn.Parameter(weight.read(), requires_grad=False)
            for name, weight in self.weights.items()
            if name in program.state_dict
        }
        return torch.export.ExportedProgram(
            root=program.graph_module,
            graph=program.graph,
            graph_signature=program.graph_signature,
            state_dict=program.state_dict | read,
            range_constraints=program.range_constraints,
            module_call_graph=program.module_call_graph,
            example_inputs=program.example_inputs,
            constants=program.constants,
        )


def traced_of(model: ir.Model) -> TracedProgram:
    """Return the program that `trace` made `model` from; later changes of the graph are not in it."""
    traced: TracedProgram = model.graph.meta[TRACED]
    return traced


def trace(
    module: nn.Module, inputs: Mapping[str, Any], dynamic: Mapping[str, Any], outputs: Mapping[str, Shape]
) -> ir.Model:
    """Export `module` at opset 24; `inputs` are examples by parameter of `forward`, in its order.

    `dynamic` holds the `dynamic_shapes` of `torch.export`, by parameter. `outputs` names the outputs and their shapes.
    Inputs keep the exporter's names and symbols until the caller names them (`name_inputs`). Two exports of the same
    module are identical bytes. Large deferred parameters are read when the graph is written.
    """
    stored = deferred(module)
    with _quiet(), _any_size(), _no_detours():
        exported = torch.export.export(
            module.eval().requires_grad_(False), (), kwargs=dict(inputs), dynamic_shapes=dict(dynamic), strict=False
        )
        program = torch.onnx.export(
            exported,
            opset_version=OPSET,
            dynamo=True,
            custom_translation_table=TRANSLATIONS,
            verbose=False,
            optimize=False,  # the optimiser compares small constants, which need values by then
        )
        assert program is not None
        put_weights(program.model, stored)
        program.optimize()
    model = program.model
    for value, (name, shape) in zip(model.graph.outputs, outputs.items(), strict=True):
        value.name, value.shape = name, ir.Shape(shape)
    _strip(model)
    model.graph.meta[TRACED] = TracedProgram(exported, stored, (), tuple(outputs))
    return model


def arguments(
    inputs: Mapping[str, Shape], sizes: Mapping[str, int], dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return examples and dynamic dimensions, for `trace`, of a module whose `forward` takes one mapping, `inputs`.

    `inputs` are shapes by the contract's names. Their symbols become dynamic; the example `sizes` of these are all
    different. Caches are of `dtype`.
    """
    examples, dynamic = dict[str, Any](), dict[str, Any]()
    for name, shape in inputs.items():
        kind = dtype if "." in name else torch.float32 if name in _REAL else torch.int64
        # Each in its own memory: equal tensors would become one graph input. Nothing is written, so none is taken.
        examples[name] = torch.empty([sizes[d] if isinstance(d, str) else d for d in shape], dtype=kind)
        dynamic[name] = {axis: torch.export.Dim.DYNAMIC for axis, d in enumerate(shape) if isinstance(d, str)} or None
    return {"inputs": examples}, {"inputs": dynamic}


@contextlib.contextmanager
def _no_detours() -> Iterator[None]:
    """Leave out what takes half of an export and changes nothing in ours.

    A cache by symbolic shapes, whose keys cost more than its hits save; where in our code each node is from, which
    `_strip` drops; another trace for operators that the exporter cannot translate, which we have none of; one more,
    which casts where PyTorch would promote a type (half-precision sums in float32, say): our modules cast by
    themselves; rewrites of what they have none of: convolutions, clips, slices side by side. The shape of a norm is
    that of what it norms, and what translates operators is read once.
    """
    nowhere = mock.Mock(**{"extract.return_value.summary.return_value": None})
    rules = tuple(rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name in _REWRITES)
    with (
        dynamo_config.patch(fake_tensor_cache_enabled=False),
        mock.patch.object(fx.proxy, "CapturedTraceback", nowhere),
        mock.patch.dict(fake_impls.get_fast_op_impls(), {torch.ops.aten.rms_norm.default: _of_one_shape}),
        mock.patch.object(_fx_passes, "decompose_with_registry", _not_in_place),
        mock.patch.object(_fx_passes, "insert_type_promotion_nodes", return_value=None),
        mock.patch.object(rewriter, "_DEFAULT_REWRITE_RULES", rules),
        mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(_registry)),
    ):
        yield


def _of_one_shape(mode: FakeTensorMode, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    with mode:
        return torch.empty_like(x)


_read_once = functools.cache(ONNXRegistry.from_torchlib)


def _registry(opset_version: int) -> ONNXRegistry:
    """Return what translates PyTorch's operators, to which an export adds its own translations."""
    registry = copy.copy(_read_once(opset_version))
    registry.functions = {target: [*found] for target, found in registry.functions.items()}
    return registry


def _not_in_place(program: torch.export.ExportedProgram, registry: object) -> torch.export.ExportedProgram:
    """Return `program`: what works in place would need a second trace, and none of our modules does."""
    for node in program.graph.nodes:
        in_place = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        assert not in_place or node.target in TRANSLATIONS, f"{node.target} works in place"
    return program


def _any_size() -> contextlib.AbstractContextManager[None]:
    """Dynamic sizes may be 0 and 1 as well: what `torch.onnx.export` sets where it traces a module itself."""
    patch: contextlib.AbstractContextManager[None] = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return patch


def put_weights(model: ir.Model, stored: Mapping[str, Deferred]) -> None:
    """Give initializers their stored tensors, by name; small ones their values, but for matrices, whose integers the
    graph may keep."""
    for name, weight in stored.items():
        if (value := model.graph.initializers.get(name)) is not None:
            value.const_value = ir.tensor(weight.read(), name=name) if is_compared(weight) else weight


def is_compared(weight: Deferred) -> bool:
    """Whether the optimiser compares the values of a parameter with those of others, and merges equal ones."""
    return weight.size <= _COMPARED and len(weight.shape) < 2


def name_inputs(model: ir.Model, inputs: Mapping[str, Shape]) -> None:
    """Give the graph's inputs, in order, the names and shapes of the contract."""
    for value, (name, shape) in zip(model.graph.inputs, inputs.items(), strict=True):
        value.name, value.shape = name, ir.Shape(shape)
    traced_of(model).inputs = tuple(inputs)


def _strip(model: ir.Model) -> None:
    """Drop stack traces, docs and inferred inner shapes."""
    model.metadata_props.clear()
    model.producer_name, model.producer_version, model.doc_string = "outrider", None, None
    keep = {id(v) for v in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())}
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if id(value) not in keep:
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which reports missing optional packages and skipped passes on every run; errors still
    raise exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
