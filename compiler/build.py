"""Recipe to plan: everything `python -m compiler build` does, in order."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from torch import nn

from compiler import drafters
from compiler.checkpoint import load_decoder
from compiler.drafters import GraphSource
from compiler.engines.onnxruntime import WeightFile, write_engine
from compiler.export import export_draft, export_target
from compiler.identity import engines_key, plan_identity, tool_versions
from compiler.lowering import lower
from compiler.models.config import DecoderConfig, read_config
from compiler.models.decoder import Decoder
from compiler.place import Place
from compiler.programs import cache_views, drafter_limits, emit_programs, symbol_limits
from compiler.recipe import Recipe, check_capacity
from compiler.text import write_tokenizer
from plans import names
from plans.buffers import DType
from plans.manifest import (
    FORMAT_VERSION,
    Drafter,
    Engine,
    Geometry,
    Manifest,
    PlanFile,
    RuleReport,
    TargetPlan,
    rejects,
)
from plans.plan import MANIFEST, Plan, file_sha256, open_plan
from plans.step_buffers import drafter_buffers, sampling_buffers, target_buffers

VIEW_BUCKET = 128  # keys: coarse enough that sizes rarely change, fine enough that masks stay short

Progress = Callable[[int, int, str], None]
"""Told (steps done, steps in all, what begins)."""

Engines = tuple[dict[str, Engine], tuple[RuleReport, ...]]
"""A target's engines by name, and what lowering did to them."""


@dataclass(frozen=True)
class Built:
    """A finished build. `reused` names what an earlier build of the same place gave: "plan" or targets."""

    plan: Plan
    reused: tuple[str, ...]


def build(recipe: Recipe, recipe_path: Path, out: Path, progress: Progress = lambda *_: None) -> Built:
    """Build the plan of `recipe` at `out`.

    An unchanged plan at `out` is kept, unchanged engines are taken over. The plan is made beside `out`
    and renamed, so that a failed build leaves `out` as it was. Raises `OutriderError`s.
    """
    config = read_config(recipe.checkpoint_path, recipe.rope_scaling)
    check_capacity(recipe, config)
    _check_served(recipe)
    place = Place(out)
    old = place.plan()
    source = _relative(recipe_path, place.folder)
    tools = tool_versions()
    sources = drafters.read_sources(recipe, config)
    checkpoints = drafters.source_hashes(recipe)
    identity = plan_identity(recipe.resolved(), checkpoints, tools)
    if old is not None and old.manifest.identity == identity:
        progress(1, 1, "unchanged: the plan is up to date")
        return Built(_with_source(old, source, place), ("plan",))

    geometry = _geometry(recipe, config, sources)
    shape = _engine_shape(recipe, geometry, sources)
    listed = drafters.manifest_drafters(recipe, sources)
    keys = {target: engines_key(checkpoints, target, shape, tools) for target in recipe.targets}
    there = old.manifest.targets if old is not None else {}
    kept = {t: there[t] for t, key in keys.items() if t in there and there[t].engines_key == key}
    stale = [target for target in recipe.targets if target not in kept]
    steps = _Steps(progress, len(kept) + (1 + (2 + len(sources)) * len(stale) if stale else 0) + 1)
    with place.workplace() as root:
        engines: dict[str, Engines] = {}
        for target, plan in kept.items():
            steps.begin(f"{target}: engines unchanged, taken from the plan that is there")
            shutil.copytree(place.folder / "engines" / target, root / "engines" / target)
            engines[target] = plan.engines, plan.lowering
        if stale:
            steps.begin("reading the checkpoint")
            decoder = load_decoder(recipe.checkpoint_path, recipe.target.dtype, recipe.rope_scaling)
            for target in stale:
                writer = _EngineWriter(target, root / "engines" / target, steps)
                writer.target(decoder, geometry, drafters.taps(sources))
                for graph in sources:
                    writer.drafter(graph, drafters.load(recipe, graph, decoder), geometry)
                engines[target] = writer.close()
        steps.begin("writing the plan")
        text = write_tokenizer(recipe.checkpoint_path, root / "tokenizer", config)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name=recipe.name,
            identity=identity,
            recipe=recipe.resolved(),
            source=source,
            models={names.TARGET: geometry} | {s.section.name: s.geometry(geometry) for s in sources},
            text=text,
            drafters=listed,
            targets={t: _target_plan(engines[t], keys[t], geometry, sources, listed) for t in recipe.targets},
            tools=tools,
            files=_list_files(root),
        )
        _write_manifest(manifest, root)
        place.put(root)
    return Built(open_plan(place.folder, verify=False), tuple(kept))


class _Steps:
    """Counts the steps of a build as they begin; how many there are is known before the first."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._begun = progress, total, 0

    def begin(self, text: str) -> None:
        self._progress(self._begun, self._total, text)
        self._begun += 1


def _check_served(recipe: Recipe) -> None:
    """Refuse what a recipe may say and no plan can do yet."""
    if recipe.capacity.branches > 1:
        raise recipe.error(
            ("capacity", "branches"), f"is {recipe.capacity.branches}; plans serve one branch for now, set it to 1"
        )
    if "onnxruntime-cpu" in recipe.targets and recipe.target.dtype != "float32":
        raise recipe.error(
            ("target", "dtype"), f"is {recipe.target.dtype}; onnxruntime-cpu computes in float32, set it to float32"
        )


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
    )


def _engine_shape(recipe: Recipe, geometry: Geometry, sources: Sequence[GraphSource]) -> dict[str, object]:
    scaling = recipe.target.rope_scaling
    return {
        "capacity": geometry.capacity,
        "dtype": recipe.target.dtype,
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
        "drafters": [
            [source.drafter.model_dump(), source.geometry(geometry).capacity, repr(source.config)] for source in sources
        ],
    }


class _EngineWriter:
    """Writes the engines of one execution target, which share a weight file."""

    def __init__(self, target: str, folder: Path, steps: _Steps) -> None:
        folder.mkdir(parents=True)
        self._target, self._folder, self._steps = target, folder, steps
        self._weights = WeightFile(folder)
        self._engines: dict[str, Engine] = {}
        self._reports: list[RuleReport] = []

    def target(self, decoder: Decoder, geometry: Geometry, taps: Sequence[int]) -> None:
        self._steps.begin(f"{self._target}: exporting the target to ONNX")
        graph = export_target(decoder, geometry.capacity, taps)
        self._steps.begin(f"{self._target}: lowering and writing the engine")
        self._write(names.TARGET, graph, exact=True)

    def drafter(self, source: GraphSource, model: nn.Module, target: Geometry) -> None:
        name = source.section.name
        self._steps.begin(f"{self._target}: exporting and lowering the drafter {name}")
        rejected = target.vocab_size if source.drafter.acceptance == "rejection" else 0
        entropy = source.drafter.entropy is not None
        rows = source.drafter.compacts
        graph = export_draft(model, source.tree, source.geometry(target).capacity, rejected, entropy=entropy, rows=rows)
        self._write(name, graph, exact=False)

    def close(self) -> Engines:
        self._weights.close()
        return self._engines, tuple(self._reports)

    def _write(self, name: str, graph: ir.Model, *, exact: bool) -> None:
        self._reports += lower(name, graph, self._target, rows=1, exact=exact)
        self._engines[name] = write_engine(graph, self._folder, name, self._weights)


def _target_plan(
    built: Engines, key: str, geometry: Geometry, sources: Sequence[GraphSource], listed: Sequence[Drafter]
) -> TargetPlan:
    """The engines with the buffers and programs that run them."""
    engines, reports = built
    buffers = [
        *target_buffers(geometry, _kv_type(engines[names.TARGET]), rejection=rejects(listed)),
        *sampling_buffers(geometry.branches),
    ]
    views = cache_views(names.TARGET, geometry)
    symbols = {names.TARGET: symbol_limits(geometry, listed)}
    for source in sources:
        name, own = source.section.name, source.geometry(geometry)
        buffers += drafter_buffers(source.drafter, own, geometry, _kv_type(engines[name]))
        views |= cache_views(name, own)
        symbols[name] = drafter_limits(own, symbols[names.TARGET])
    return TargetPlan(
        engines=engines,
        engines_key=key,
        buffers=tuple(buffers),
        views=views,
        symbols=symbols,
        programs=emit_programs(engines, listed),
        lowering=reports,
    )


def _kv_type(engine: Engine) -> DType:
    return next(t.dtype for t in engine.inputs if t.name == names.k_cache(0))


def _list_files(root: Path) -> tuple[PlanFile, ...]:
    paths = sorted(p for p in root.rglob("*") if p.is_file())
    return tuple(
        PlanFile(path=p.relative_to(root).as_posix(), sha256=file_sha256(p), size=p.stat().st_size) for p in paths
    )


def _write_manifest(manifest: Manifest, root: Path) -> Path:
    path = root / MANIFEST
    path.write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
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
