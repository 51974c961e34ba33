"""Recipe to plan: everything `python -m compiler build` does, in order."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import onnx_ir as ir

from compiler import drafters
from compiler.absorption import absorb
from compiler.buckets import step_buckets
from compiler.checkpoint import load_decoder
from compiler.drafters import GraphSource
from compiler.engines import facts_of_machine, kernel_architectures, open_folder
from compiler.export import export_draft, export_target
from compiler.identity import engines_key, plan_identity, tool_versions
from compiler.lowering import lower
from compiler.models.config import DecoderConfig, WeightType, read_config
from compiler.place import Place
from compiler.programs import cache_views, drafter_limits, emit_programs, query_views, stages_around, symbol_limits
from compiler.recipe import Recipe, check_capacity
from compiler.recipe_backends import (
    PACKAGES,
    BackendBuild,
    TensorRtRtxSection,
    TensorRtSection,
)
from compiler.served import check_partial, check_served
from compiler.text import read_text
from plans import names
from plans.buffers import DType, Tensor
from plans.build_record import BuildRecord, write_build_record
from plans.machine import peak_rss_bytes, processor
from plans.manifest import (
    FORMAT_VERSION,
    BackendPlan,
    Drafter,
    Engine,
    Geometry,
    GraphDrafter,
    Manifest,
    PlanFile,
    RuleReport,
    rejects,
)
from plans.partial_kv import PartialKv
from plans.plan import MANIFEST, Plan, file_sha256, manifest_json, open_plan
from plans.skeleton import SKELETON_FILE, Skeleton
from plans.step_buffers import drafter_buffers, partial_buffers, sampling_buffers, status_buffers, target_buffers
from plugins.cuda.compile import compile_kernels

VIEW_BUCKET = 128  # keys: coarse enough that sizes rarely change, fine enough that masks stay short

Progress = Callable[[int, int, str], None]
"""Told (steps done, steps in all, what begins)."""


@dataclass(frozen=True)
class Engines:
    """A backend's engines by name, what lowering did to them, and the files of our ops' kernels by architecture."""

    engines: dict[str, Engine]
    reports: tuple[RuleReport, ...]
    kernels: dict[str, str]


@dataclass(frozen=True)
class Built:
    """A finished build. `reused` names what an earlier build of the same place gave: "plan" or backends."""

    plan: Plan
    reused: tuple[str, ...]


def build(recipe: Recipe, recipe_path: Path, out: Path, progress: Progress = lambda *_: None) -> Built:
    """Build the plan of `recipe` at `out`.

    An unchanged plan at `out` is kept, unchanged engines are taken over. The plan is made beside `out`
    and renamed, so that a failed build leaves `out` as it was. Raises `OutriderError`s.
    """
    started = perf_counter()
    config = read_config(recipe.checkpoint_path, recipe.rope_scaling)
    check_capacity(recipe, config)
    check_served(recipe)
    place = Place(out)
    old = place.plan()
    source = _relative(recipe_path, place.folder)
    sections = {backend.kind: backend for backend in recipe.backends}
    machine = {kind: facts_of_machine(backend) for kind, backend in sections.items()}
    tools = tool_versions(package for kind in sections for package in PACKAGES[kind])
    tools |= {name: fact for facts in machine.values() for name, fact in facts.items()}
    sources = drafters.read_sources(recipe, config)
    checkpoints = drafters.source_hashes(recipe)
    identity = plan_identity(recipe.resolved(), checkpoints, tools)
    if old is not None and old.manifest.identity == identity:
        progress(1, 1, "unchanged: the plan is up to date")
        return Built(_with_source(old, source, place), ("plan",))
    text = read_text(recipe.checkpoint_path, config)

    geometry = _geometry(recipe, config, sources)
    listed = drafters.manifest_drafters(recipe, sources)
    partial = recipe.partial_kv.settings()
    if partial is not None:
        check_partial(recipe, geometry, listed, partial)
    limits = _limits(geometry, sources, listed, partial)
    buffers = {
        kind: _buffers(backend, recipe.dtype(backend), geometry, sources, listed, partial)
        for kind, backend in sections.items()
    }
    keys = {
        kind: engines_key(
            checkpoints,
            _engine_shape(recipe, backend, geometry, sources, limits),
            tool_versions(PACKAGES[kind]) | machine[kind],
        )
        for kind, backend in sections.items()
    }
    there = old.manifest.backends if old is not None else {}
    kept = {t: there[t] for t, key in keys.items() if t in there and there[t].engines_key == key}
    stale = [kind for kind in sections if kind not in kept]
    dtypes = list(dict.fromkeys(recipe.dtype(sections[kind]) for kind in stale))
    steps = _Steps(progress, len(kept) + (2 + len(sources)) * len(dtypes) + (1 + len(sources)) * len(stale) + 1)
    with place.workplace() as root:
        engines: dict[str, Engines] = {}
        for backend, plan in kept.items():
            steps.begin(f"{backend}: engines unchanged, taken from the plan that is there")
            shutil.copytree(place.folder / "engines" / backend, root / "engines" / backend)
            for file in plan.kernels.values():
                _copy(place.folder / file, root / file)
            engines[backend] = Engines(plan.engines, plan.lowering, plan.kernels)
        for dtype in dtypes:
            exported = _export(recipe, dtype, geometry, sources, steps)
            for kind in (kind for kind in stale if recipe.dtype(sections[kind]) == dtype):
                around = _Around(listed, buffers[kind])
                engines[kind] = _write_engines(recipe, sections[kind], exported, around, limits, root, steps)
        steps.begin("writing the plan")
        text.write(root / "tokenizer")
        if recipe.skeleton is not None:
            skeleton = Skeleton(**recipe.skeleton.model_dump())
            (root / SKELETON_FILE).write_text(skeleton.model_dump_json(indent=1), encoding="utf-8")
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name=recipe.name,
            identity=identity,
            recipe=recipe.resolved(),
            source=source,
            models={names.TARGET: geometry} | {s.section.name: s.geometry(geometry) for s in sources},
            text=text.text,
            partial_kv=partial,
            drafters=listed,
            backends={
                t: _backend_plan(engines[t], keys[t], limits, geometry, sources, listed, buffers[t], partial)
                for t in sections
            },
            tools=tools,
            files=_list_files(root),
        )
        _write_manifest(manifest, root)
        seconds, peak = round(perf_counter() - started, 3), peak_rss_bytes()
        record = BuildRecord(seconds=seconds, peak_rss_bytes=peak, processor=processor(), reused=tuple(kept))
        write_build_record(record, root)
        place.put(root)
    return Built(open_plan(place.folder, verify=False), tuple(kept))


@dataclass(frozen=True)
class _Around:
    """What runs around the engines of a plan: for its drafters, on these buffers."""

    listed: Sequence[Drafter]
    buffers: Sequence[Tensor]

    def take_into(self, graph: ir.Model, model: str) -> tuple[str, ...]:
        """Absorb the ops around the engine of `model`; their names."""
        drafter = next((d for d in self.listed if isinstance(d, GraphDrafter) and d.name == model), None)
        free = {names.ATTN_BIAS: names.FREE_BIAS} if drafter is None else {}
        return absorb(graph, *stages_around(model, drafter), {tensor.name: tensor for tensor in self.buffers}, free)


class _Steps:
    """Counts the steps of a build as they begin; how many there are is known before the first."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._begun = progress, total, 0

    def begin(self, text: str) -> None:
        self._progress(self._begun, self._total, text)
        self._begun += 1

    def detail(self, text: str) -> None:
        """What the present step is at."""
        self._progress(max(self._begun - 1, 0), self._total, text)


def _geometry(recipe: Recipe, config: DecoderConfig, sources: Sequence[GraphSource]) -> Geometry:
    context = recipe.capacity.context
    rounded = -(-context // VIEW_BUCKET) * VIEW_BUCKET
    return Geometry(
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        feature_size=config.hidden_size * len(drafters.taps(sources)),
        context=context,
        view_bucket=VIEW_BUCKET,
        capacity=rounded + VIEW_BUCKET,
        prefill_chunk=recipe.capacity.prefill_chunk,
        branches=recipe.capacity.branches,
        rows=recipe.capacity.branches if recipe.capacity.batching else 1,
    )


def _limits(
    geometry: Geometry, sources: Sequence[GraphSource], listed: Sequence[Drafter], partial: PartialKv | None
) -> dict[str, dict[str, int]]:
    """By model: the largest value of every symbol."""
    target = symbol_limits(geometry, listed, partial)
    own = {s.section.name: drafter_limits(s.drafter, s.geometry(geometry), target) for s in sources}
    return {names.TARGET: target, **own}


def _engine_shape(
    recipe: Recipe,
    backend: BackendBuild,
    geometry: Geometry,
    sources: Sequence[GraphSource],
    limits: Mapping[str, Mapping[str, int]],
) -> dict[str, object]:
    """What a backend's engines depend on beside weights and tools. Engines of ONNX Runtime take any size of step."""
    scaling = recipe.target.rope_scaling
    return {
        "backend": backend.model_dump(mode="json", exclude={"timing_cache"}),
        "limits": limits if isinstance(backend, TensorRtRtxSection | TensorRtSection) else None,
        "capacity": geometry.capacity,
        "dtype": recipe.dtype(backend),
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
        "drafters": [
            [source.drafter.model_dump(), source.geometry(geometry).capacity, repr(source.config)] for source in sources
        ],
        "branches": geometry.branches if sources else 1,
        "rows": geometry.rows,
        "partial": recipe.partial_kv.enabled,
    }


def _export(
    recipe: Recipe, dtype: WeightType, geometry: Geometry, sources: Sequence[GraphSource], steps: _Steps
) -> dict[str, ir.Model]:
    """Every model's graph by name, in `dtype`: the target first."""
    steps.begin(f"reading the checkpoint in {dtype}")
    decoder = load_decoder(recipe.checkpoint_path, dtype, recipe.rope_scaling)
    steps.begin("exporting the target to ONNX")
    asked = recipe.partial_kv.enabled
    graphs = {names.TARGET: export_target(decoder, geometry.capacity, drafters.taps(sources), queries=asked)}
    for source in sources:
        name, drafter = source.section.name, source.drafter
        steps.begin(f"exporting the drafter {name} to ONNX")
        graphs[name] = export_draft(
            drafters.load(recipe, source, decoder, dtype),
            source.tree,
            source.geometry(geometry).capacity,
            geometry.vocab_size if drafter.acceptance == "rejection" else 0,
            positions=max(source.geometry(geometry).capacity, geometry.capacity + drafter.grown),
            entropy=drafter.entropy is not None,
            rows=drafter.compacts,
            branches=geometry.branches,
        )
    return graphs


def _write_engines(
    recipe: Recipe,
    backend: BackendBuild,
    graphs: Mapping[str, ir.Model],
    around: _Around,
    limits: Mapping[str, Mapping[str, int]],
    root: Path,
    steps: _Steps,
) -> Engines:
    """Lower copies of the graphs for one backend, and write its engines and kernels."""
    place = root / "engines" / backend.kind
    place.mkdir(parents=True)
    cache = recipe.timing_cache_path(backend)
    folder = open_folder(backend, place, lambda text: steps.detail(f"{backend.kind}: {text}"), cache)
    engines: dict[str, Engine] = {}
    reports: list[RuleReport] = []
    for name, graph in graphs.items():
        steps.begin(f"{backend.kind}: lowering {name} and writing its engine")
        own = graph.clone()
        held = around.take_into(own, name) if folder.takes_ops(graph) else ()
        arenas = 1 + (recipe.partial_kv.enabled and name == names.TARGET)
        reports += lower(name, own, backend.kind, rows=limits[name][names.ROWS], arenas=arenas)
        engines[name] = folder.write(name, own, limits[name]).model_copy(update={"holds": held})
    folder.close()
    return Engines(engines, tuple(reports), _compile_kernels(backend, root, steps))


def _buffers(
    backend: BackendBuild,
    dtype: WeightType,
    geometry: Geometry,
    sources: Sequence[GraphSource],
    listed: Sequence[Drafter],
    partial: PartialKv | None,
) -> tuple[Tensor, ...]:
    """What a session of a backend has; its arenas are of the weights' type."""
    kv = DType(dtype)
    buffers = [
        *target_buffers(geometry, kv, rejection=rejects(listed)),
        *(() if partial is None else partial_buffers(geometry, partial, kv)),
        *sampling_buffers(geometry.branches),
        *(status_buffers() if isinstance(backend, TensorRtSection) else ()),
    ]
    for source in sources:
        buffers += drafter_buffers(source.drafter, source.geometry(geometry), geometry, kv)
    return tuple(buffers)


def _backend_plan(
    built: Engines,
    key: str,
    limits: dict[str, dict[str, int]],
    geometry: Geometry,
    sources: Sequence[GraphSource],
    listed: Sequence[Drafter],
    buffers: tuple[Tensor, ...],
    partial: PartialKv | None,
) -> BackendPlan:
    """The engines with the buffers and programs that run them."""
    engines = built.engines
    views = cache_views(names.TARGET, geometry)
    if partial is not None:
        views |= cache_views(names.PARTIAL, geometry) | query_views(geometry)
    for source in sources:
        views |= cache_views(source.section.name, source.geometry(geometry))
    return BackendPlan(
        engines=engines,
        engines_key=key,
        buffers=buffers,
        views=views,
        symbols=limits,
        programs=emit_programs(engines, listed, geometry.branches, partial),
        lowering=built.reports,
        kernels=built.kernels,
        buckets=step_buckets(geometry, limits, listed, engines) if built.kernels else {},
    )


def _compile_kernels(backend: BackendBuild, root: Path, steps: _Steps) -> dict[str, str]:
    """Our ops' kernels for the devices of a backend, by architecture; backends of one plan share them."""
    files: dict[str, str] = {}
    for architecture in kernel_architectures(backend):
        files[architecture] = f"kernels/{architecture}.cubin"
        path = root / files[architecture]
        if not path.exists():
            steps.detail(f"{backend.kind}: compiling the ops for {architecture}")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(compile_kernels(architecture))
    return files


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(exist_ok=True)
    shutil.copyfile(source, to)


def _list_files(root: Path) -> tuple[PlanFile, ...]:
    paths = sorted(p for p in root.rglob("*") if p.is_file())
    return tuple(
        PlanFile(path=p.relative_to(root).as_posix(), sha256=file_sha256(p), size=p.stat().st_size) for p in paths
    )


def _write_manifest(manifest: Manifest, root: Path) -> Path:
    path = root / MANIFEST
    path.write_text(manifest_json(manifest.model_dump(mode="json")), encoding="utf-8")
    return path


def _with_source(plan: Plan, source: str, place: Place) -> Plan:
    """The plan that is there, pointing to the recipe it was just asked for from."""
    if plan.manifest.source == source:
        return plan
    manifest = plan.manifest.model_copy(update={"source": source})
    with place.workplace() as temporary:
        _write_manifest(manifest, temporary).replace(plan.root / MANIFEST)
    return Plan(plan.root, manifest)


def _relative(recipe_path: Path, folder: Path) -> str:
    """The recipe seen from the plan. A recipe that is a link stays one: its own paths start from where it lies."""
    return os.path.relpath(recipe_path.parent.resolve() / recipe_path.name, folder)
