"""Engines for TensorRT: a network made from a graph, with ranges of shapes, built by either TensorRT library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import onnx_ir as ir

from outrider.compiler.backends.base import Report
from outrider.compiler.backends.tensorrt import BuilderBackend
from outrider.compiler.engines.onnx_file import WeightFile, describe_engine, write_graph
from outrider.compiler.engines.tensorrt_network import (
    allow_unfused_attention,
    carry_bits,
    check_bindings,
    check_cache_updates,
)
from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.manifest import Engine, Profile, Range
from outrider.plugins.tensorrt.log import make_log

FEW_TOKENS = 64
"""Steps up to this size decode and verify, larger ones prefill: each of the two ranges has its own kernels."""
_OPTIMAL = {names.NEW: 8, names.LOGITS: 8, names.VIEW: 1024}
"""Sizes that kernels are chosen for, within a range; the range's largest for other symbols."""


def profiles_of(limits: Mapping[str, int]) -> tuple[Profile, ...]:
    """Return the ranges of symbols that kernels are chosen for: few new tokens, and many where a step may have many.

    No range holds one token only, because TensorRT would lay out the weights anew for it, a second copy in memory.
    """
    most = limits[names.NEW]
    news = [Range(least=1, most=min(FEW_TOKENS, most))]
    if most > FEW_TOKENS:
        news.append(Range(least=FEW_TOKENS + 1, most=most))
    fixed = {names.FEATURED: Range(least=limits[names.FEATURED], most=limits[names.FEATURED])}
    free = {symbol: Range(least=1, most=limits[symbol]) for symbol in (names.VIEW, names.LOGITS)}
    return tuple(Profile(symbols={names.NEW: new, **free, **fixed}) for new in news)


class FrontEnd(Protocol):
    """Puts a graph into a TensorRT network."""

    @property
    def name(self) -> str:
        """The front end's name, as `plans.manifest.Engine.front_end` records it."""

    def reason_against(self, model: ir.Model) -> str | None:
        """Return why the front end declines this graph; None where it does not."""

    def fill(self, engine: str, model: ir.Model, network: Any, workplace: Path) -> Any:
        """Put the lowered `model` into an empty `network`, with its inputs and outputs by name.

        `workplace` is a folder for files that live as long as the network. The caller must keep the returned object as
        long, too. Raises `PlanError`, with the library's own words.
        """


class OnnxFront:
    """The front end that reads the lowered graph with TensorRT's own parser, so it can serve every engine."""

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


class TensorRtEngines:
    """Writes the engines of one backend into `folder`; `report` is called with the builder's phases.

    `wanted` makes a front end from the library's package and a log; it reads the graphs that it does not decline. The
    parser reads all other graphs. Builds read and write the file `cache`.
    """

    def __init__(
        self,
        folder: Path,
        backend: BuilderBackend,
        report: Report,
        wanted: Callable[[Any, Any], FrontEnd] | None = None,
        cache: Path | None = None,
    ) -> None:
        self._folder, self._backend, self._cache, self._writing = folder, backend, cache, ""
        self._trt = backend.load()
        self._log = make_log(self._trt)
        self._wanted = None if wanted is None else wanted(self._trt, self._log)
        self._monitor = _make_monitor(self._trt, lambda phase: report(f"{self._writing}: {phase}"))
        try:
            self._builder = self._trt.Builder(self._log)  # must not outlive the log and the monitor
        except TypeError:  # raised by the bindings when TensorRT gives them no builder
            raise PlanError(f"{self._trt.__name__} cannot start: {self._log.said()}") from None

    def takes_ops(self, model: ir.Model) -> bool:
        """Return whether the engine may hold the ops that are plugins: only where the parser reads the graph."""
        return self._backend.holds_ops and (self._wanted is None or self._wanted.reason_against(model) is not None)

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        self._writing = name
        path = self._folder / f"{name}.engine"
        engine = describe_engine(model, f"engines/{self._folder.name}/{path.name}")
        with TemporaryDirectory(prefix="outrider-tensorrt-") as workplace:
            network = self._builder.create_network(1 << int(self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            front, said = self._choose_front(model)
            held = front.fill(name, model, network, Path(workplace))
            check_bindings(name, network, engine)
            check_cache_updates(self._trt, name, network, engine)
            allow_unfused_attention(self._trt, network)
            profiles = profiles_of(limits)
            built = self._build(name, network, engine, profiles)
            layers = Counter(_kind(network.get_layer(i)) for i in range(network.num_layers))
            del held
        with path.open("wb") as file:
            file.write(built)
        facts = {
            "front_end": said,
            "profiles": profiles,
            "layers": dict(layers.most_common()),
            **self._backend.provenance(self._trt),
        }
        return engine.model_copy(update=facts)

    def close(self) -> None:
        """Nothing to finish: every engine holds its own weights."""

    def _choose_front(self, model: ir.Model) -> tuple[FrontEnd, str]:
        """Return the front end that reads the graph, and the text to record: the wanted one may decline."""
        parser = OnnxFront(self._trt, self._log)
        wanted = self._wanted or parser
        reason = wanted.reason_against(model)
        return (wanted, wanted.name) if reason is None else (parser, f"{parser.name}: {reason}")

    def _build(self, name: str, network: Any, engine: Engine, profiles: tuple[Profile, ...]) -> Any:
        trt, backend = self._trt, self._backend
        config = self._builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, backend.workspace_mb << 20)
        config.clear_flag(trt.BuilderFlag.TF32)  # float32 is float32
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        backend.configure(trt, config, self._cache)
        config.progress_monitor = self._monitor
        for profile in profiles:
            config.add_optimization_profile(_shapes(self._builder, engine, profile))
        self._log.clear()
        built = self._builder.build_serialized_network(network, config)
        if built is None:
            raise PlanError(f"engine {name}: TensorRT cannot build it: {self._log.said()}")
        if self._cache is not None:
            backend.keep(config, self._cache)
        return built


def _shapes(builder: Any, engine: Engine, profile: Profile) -> Any:
    """Return the optimisation profile of an engine's inputs."""
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


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _make_monitor(trt: Any, report: Report) -> Any:
    """Return a monitor that reports the builder's outer phases as they begin."""

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
