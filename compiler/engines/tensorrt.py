"""Engines for TensorRT: an ONNX graph, parsed, with ranges of shapes, built without running anything."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir

from compiler.engines.onnx_file import WeightFile, describe_engine, write_graph
from compiler.engines.report import Report
from compiler.recipe_targets import TensorRtRtxSection
from plans import names
from plans.errors import PlanError
from plans.manifest import Engine, Profile, Range

FEW_TOKENS = 64
"""Up to here tokens are decoded and verified, above it prompts are computed: each has kernels of its own."""
_OPTIMAL = {names.NEW: 8, names.LOGITS: 8, names.VIEW: 1024}
"""Sizes that kernels are chosen for, where a range has them; else its largest."""


def library() -> Any:
    """The package `tensorrt_rtx`. Raises `PlanError` where it is missing."""
    try:
        return importlib.import_module("tensorrt_rtx")
    except ImportError as error:
        raise PlanError(
            f"the target tensorrt-rtx needs TensorRT for RTX, which cannot be loaded ({error}); run "
            "`pip install 'outrider[tensorrt-rtx]'`, or leave the target out"
        ) from None


def profiles_of(limits: Mapping[str, int]) -> tuple[Profile, ...]:
    """The ranges of symbols that kernels are chosen for: few new tokens, and many where a step may have them.

    Never a range of one token alone: TensorRT lays its weights out anew for that, once more in memory.
    """
    most = limits[names.NEW]
    news = [Range(least=1, most=min(FEW_TOKENS, most))]
    if most > FEW_TOKENS:
        news.append(Range(least=FEW_TOKENS + 1, most=most))
    fixed = {names.FEATURED: Range(least=limits[names.FEATURED], most=limits[names.FEATURED])}
    free = {symbol: Range(least=1, most=limits[symbol]) for symbol in (names.VIEW, names.LOGITS)}
    return tuple(Profile(symbols={names.NEW: new, **free, **fixed}) for new in news)


class TensorRtEngines:
    """Writes the engines of one execution target into `folder`; `report` is told what the builder does."""

    def __init__(self, folder: Path, target: TensorRtRtxSection, report: Report) -> None:
        self._folder, self._target, self._writing = folder, target, ""
        self._trt = library()
        self._log = _log(self._trt)
        self._monitor = _monitor(self._trt, lambda phase: report(f"{self._writing}: {phase}"))
        self._builder = self._trt.Builder(self._log)  # which must not outlive the two

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        self._writing = name
        path = self._folder / f"{name}.engine"
        engine = describe_engine(model, f"engines/{self._folder.name}/{path.name}")
        with TemporaryDirectory(prefix="outrider-tensorrt-") as workplace:
            network, parser = self._parse(name, model, Path(workplace))
            check_bindings(name, network, engine)
            check_cache_updates(self._trt, name, network, engine)
            _allow_unfused_attention(self._trt, network)
            profiles = profiles_of(limits)
            built = self._build(name, network, engine, profiles)
            layers = Counter(_kind(network.get_layer(i)) for i in range(network.num_layers))
            del parser  # it owns the weights that the network reads
        with path.open("wb") as file:
            file.write(built)
        return engine.model_copy(
            update={
                "profiles": profiles,
                "builder": f"tensorrt_rtx {self._trt.__version__}",
                "devices": self._target.compute_capabilities,
                "layers": dict(layers.most_common()),
            }
        )

    def close(self) -> None:
        """Every engine has its weights in itself."""

    def _parse(self, name: str, model: ir.Model, workplace: Path) -> tuple[Any, Any]:
        weights = WeightFile(workplace)
        write_graph(model, workplace / "graph.onnx", weights, inlined=True)
        weights.close()
        trt = self._trt
        network = self._builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, self._log)
        if not parser.parse_from_file(str(workplace / "graph.onnx")):
            said = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
            raise PlanError(f"engine {name}: TensorRT cannot read its graph: {said or self._log.said()}")
        return network, parser

    def _build(self, name: str, network: Any, engine: Engine, profiles: tuple[Profile, ...]) -> Any:
        trt, target = self._trt, self._target
        config = self._builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, target.workspace_mb << 20)
        config.clear_flag(trt.BuilderFlag.TF32)  # float32 is float32
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # else a step cannot be captured in a CUDA graph
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.num_compute_capabilities = len(target.compute_capabilities)
        for index, capability in enumerate(target.compute_capabilities):
            config.set_compute_capability(trt.ComputeCapability.__members__[capability.replace("_", "").upper()], index)
        config.progress_monitor = self._monitor
        for profile in profiles:
            config.add_optimization_profile(_shapes(self._builder, engine, profile))
        self._log.clear()
        built = self._builder.build_serialized_network(network, config)
        if built is None:
            raise PlanError(f"engine {name}: TensorRT cannot build it: {self._log.said()}")
        return built


def check_bindings(name: str, network: Any, engine: Engine) -> None:
    """Raise `PlanError` unless the network's inputs and outputs are the engine's, in name, type and shape."""
    for kind, count, get, tensors in (
        ("input", network.num_inputs, network.get_input, engine.inputs),
        ("output", network.num_outputs, network.get_output, engine.outputs),
    ):
        found = {tensor.name: tensor for tensor in (get(i) for i in range(count))}
        expected = {tensor.name: tensor for tensor in tensors}
        if set(found) != set(expected):
            raise PlanError(f"engine {name}: TensorRT has the {kind}s {sorted(found)}, the graph {sorted(expected)}")
        for key, tensor in expected.items():
            shape = tuple(d if isinstance(d, int) else -1 for d in tensor.shape)
            type_, got = tensor.dtype.value, found[key]
            if got.dtype.name != _TYPES[type_] or not _agree(tuple(got.shape), shape):
                raise PlanError(
                    f"engine {name}: {kind} {key!r} is {type_} {shape} in the graph, {got.dtype.name} "
                    f"{tuple(got.shape)} in TensorRT"
                )


def check_cache_updates(trt: Any, name: str, network: Any, engine: Engine) -> None:
    """Raise `PlanError` unless every cache has one update in place, from its input to the output that aliases it."""
    updates = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            updates[layer.get_output(0).name] = layer.get_input(0).name
    if updates != engine.aliases:
        raise PlanError(f"engine {name}: TensorRT updates the caches {updates}, the graph {engine.aliases}")


_TYPES = {
    "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64",
}  # fmt: skip


def _agree(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Sizes that one of them leaves open may be anything."""
    return len(found) == len(expected) and all(f == e or -1 in (f, e) for f, e in zip(found, expected, strict=True))


def _shapes(builder: Any, engine: Engine, profile: Profile) -> Any:
    """The optimisation profile of an engine's inputs."""
    made = builder.create_optimization_profile()
    for tensor in engine.inputs:
        if all(isinstance(d, int) for d in tensor.shape):
            continue
        ranges = [Range(least=d, most=d) if isinstance(d, int) else profile.symbols[d] for d in tensor.shape]
        best = [
            min(max(_OPTIMAL.get(str(d), r.most), r.least), r.most) for d, r in zip(tensor.shape, ranges, strict=True)
        ]
        made.set_shape(tensor.name, [r.least for r in ranges], best, [r.most for r in ranges])
    return made


def _allow_unfused_attention(trt: Any, network: Any) -> None:
    """Attention for which no fused kernel exists (float32, scattered views) may be taken apart."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _log(trt: Any) -> Any:
    """A logger that keeps errors, for the sentence that is raised, and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self._errors.append(" ".join(message.split()))

        def clear(self) -> None:
            self._errors.clear()

        def said(self) -> str:
            return "; ".join(self._errors) or "it gives no reason"

    return Log()


def _monitor(trt: Any, report: Report) -> Any:
    """Reports the builder's outer phases as they begin."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if not parent:
                report(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            return True

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()
