"""Recipe to plan: everything `python -m outrider.compiler build` does, in order."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import onnx_ir as ir
from torch import nn

from outrider.compiler import drafters
from outrider.compiler.backends.base import Backend
from outrider.compiler.buckets import step_buckets
from outrider.compiler.calibrated import calibrate_by_recipe
from outrider.compiler.checkpoint import defer_decoder
from outrider.compiler.design import PlanDesign, check_feature, design_plan
from outrider.compiler.export import export_draft, export_target
from outrider.compiler.identity import engines_key, plan_identity, tool_versions
from outrider.compiler.inlining import inline_stages
from outrider.compiler.lowering import lower
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import DecoderDraft
from outrider.compiler.place import Place
from outrider.compiler.probes.graph import write_probe
from outrider.compiler.programs import emit_programs, stages_around
from outrider.compiler.quantization.graph import quantize
from outrider.compiler.quantization.keeping import reason_against, with_minimums
from outrider.compiler.recipe import Recipe
from outrider.compiler.recipe_sections import WeightsSection
from outrider.compiler.recipe_source import Location
from outrider.compiler.text import CheckpointText, read_text
from outrider.plans import names
from outrider.plans.build_record import BuildRecord, write_build_record
from outrider.plans.machine import peak_rss_bytes, processor
from outrider.plans.manifest import (
    FORMAT_VERSION,
    BackendPlan,
    Engine,
    GraphDrafter,
    Manifest,
    PlanFile,
    Probe,
    RuleReport,
    deciding_engines,
)
from outrider.plans.plan import MANIFEST, Plan, file_sha256, manifest_json, open_plan
from outrider.plans.skeleton import SKELETON_FILE, Skeleton
from outrider.plugins.cuda.compile import compile_kernels

_LOG = logging.getLogger("outrider")
Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, text of the step that begins)."""


@dataclass(frozen=True)
class Engines:
    """A backend's engines by name, the reports of their lowering, our ops' kernel files by architecture, the probe."""

    engines: dict[str, Engine]
    reports: tuple[RuleReport, ...]
    kernels: dict[str, str]
    probe: Probe | None


@dataclass(frozen=True)
class BuildResult:
    """A finished build. `reused` names the parts taken from an earlier build at the same place: "plan", or backends."""

    plan: Plan
    reused: tuple[str, ...]


def build(recipe: Recipe, recipe_path: Path, out: Path, progress: Progress = lambda *_: None) -> BuildResult:
    """Build the plan of `recipe` at `out`.

    An unchanged plan at `out` is kept, and unchanged engines are taken over. The new plan is written beside `out`
    and then renamed, so that a failed build leaves `out` as it was. Raises `OutriderError`s.
    """
    started = perf_counter()
    design = design_plan(recipe)
    place = Place(out)
    old = place.plan()
    # A link is not resolved: the recipe's paths start at the link's folder.
    source = os.path.relpath(recipe_path.parent.resolve() / recipe_path.name, place.folder)
    sections = {backend.kind: backend for backend in recipe.backends}
    own = {kind: tool_versions(each.packages) | each.facts_of_machine() for kind, each in sections.items()}
    tools = {name: fact for facts in own.values() for name, fact in facts.items()}
    checkpoints = drafters.source_hashes(recipe)
    identity = plan_identity(recipe.resolved(), checkpoints, tools)
    if old is not None and old.manifest.identity == identity:
        progress(1, 1, "unchanged: the plan is up to date")
        return BuildResult(_with_source(old, source, place), ("plan",))
    text = read_text(recipe.checkpoint_path, design.config)
    for end, word in text.ordinary_ends().items():
        _LOG.warning(
            "%s: the end token %d is %r, which is no special token: answers end where the model writes it; see "
            "eos_token_id in generation_config.json and config.json",
            recipe.checkpoint_path,
            end,
            word,
        )

    keys = {kind: engines_key(checkpoints, design.engine_shape(sections[kind]), own[kind]) for kind in sections}
    there = old.manifest.backends if old is not None else {}
    kept = {t: there[t] for t, key in keys.items() if t in there and there[t].engines_key == key}
    stale = [kind for kind in sections if kind not in kept]
    dtypes = list(dict.fromkeys(recipe.graph_dtype(sections[kind]) for kind in stale))
    each = 1 + len(design.models) + design.searched_layers
    steps = _Steps(progress, len(kept) + each * len(dtypes) + len(design.models) * len(stale) + 1)
    with place.workplace() as root:
        engines: dict[str, Engines] = {}
        for backend, plan in kept.items():
            steps.begin(f"{backend}: engines unchanged, taken from the plan that is there")
            shutil.copytree(place.folder / "engines" / backend, root / "engines" / backend)
            for file in plan.kernels.values():
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(place.folder / file, root / file)
            engines[backend] = Engines(plan.engines, plan.lowering, plan.kernels, plan.probe)
        for dtype in dtypes:
            exported = _export(design, dtype, text, steps)
            reports = _quantize(design, exported)
            for kind in (kind for kind in stale if recipe.graph_dtype(sections[kind]) == dtype):
                written = _write_engines(design, sections[kind], exported, root, steps)
                engines[kind] = replace(written, reports=(*reports, *written.reports))
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
            models=design.models,
            text=text.text.model_copy(update={"tool_parser": recipe.target.tool_parser}),
            partial_kv=design.partial,
            drafters=design.drafters,
            backends={kind: _backend_plan(design, sections[kind], engines[kind], keys[kind]) for kind in sections},
            tools=tools,
            files=_list_files(root),
        )
        _write_manifest(manifest, root)
        seconds, peak = round(perf_counter() - started, 3), peak_rss_bytes()
        record = BuildRecord(seconds=seconds, peak_rss_bytes=peak, processor=processor(), reused=tuple(kept))
        write_build_record(record, root)
        place.put(root)
    return BuildResult(open_plan(place.folder, verify=False), tuple(kept))


class _Steps:
    """Counts a build's steps as they begin; their total is known before the first."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._begun = progress, total, 0

    def begin(self, text: str) -> None:
        self._progress(self._begun, self._total, text)
        self._begun += 1

    def detail(self, text: str) -> None:
        """Report the progress of the current step."""
        self._progress(max(self._begun - 1, 0), self._total, text)


def _export(design: PlanDesign, dtype: WeightType, text: CheckpointText, steps: _Steps) -> dict[str, ir.Model]:
    """Export every model's graph in `dtype`, by name, the target first."""
    recipe, target = design.recipe, design.target
    steps.begin(f"checking the checkpoint for {dtype}")
    decoder = defer_decoder(recipe.checkpoint_path, dtype, recipe.rope_scaling, recipe.capacity.context)
    _check_kept(recipe, ("target",), decoder, recipe.target.weights)

    def search(name: str, decoder: Decoder, weights: WeightsSection | None) -> None:
        layers = decoder.config.num_layers
        calibrate_by_recipe(
            decoder,
            recipe,
            weights,
            text,
            lambda i: steps.begin(f"searching weights of {name}: layer {i + 1} of {layers}"),
        )

    search(names.TARGET, decoder, recipe.target.weights)
    steps.begin("exporting the target to ONNX")
    asked = recipe.partial_kv.enabled
    taps = drafters.taps(design.sources)
    states = (target.branches, target.convolutions.log) if target.convolutions is not None else (0, 0)
    graphs = {names.TARGET: export_target(decoder, target.capacity, taps, queries=asked, states=states)}
    for source in design.sources:
        name, drafter = source.section.name, source.drafter
        capacity = design.models[name].capacity
        model = drafters.defer(recipe, source, decoder, dtype)
        _check_kept(recipe, ("drafters", source.index), model, source.section.weights)
        if isinstance(model, DecoderDraft):
            search(name, model.decoder, source.section.weights)
        steps.begin(f"exporting the drafter {name} to ONNX")
        graphs[name] = export_draft(
            model,
            source.tree,
            capacity,
            target.vocab_size,
            rejected=drafter.acceptance == "rejection",
            positions=max(capacity, target.capacity + drafter.grown),
            slots=drafter.compacts,
            branches=target.branches,
            columns=drafters.feature_columns(source, taps, decoder.config.hidden_size),
            featured=target.feature_size,
        )
    return graphs


def _check_kept(recipe: Recipe, place: Location, model: nn.Module, weights: WeightsSection | None) -> None:
    """Raise `RecipeError` where the checkpoint's integers can neither be kept nor rounded, or a backend has no such."""
    form = None if weights is None else weights.form
    if (unsigned := with_minimums(model, form)) is not None:
        clause = f"is one in which {unsigned}"
        advice = "give a checkpoint with signed integers, such as Q4_0 or Q8_0 of GGUF"
        check_feature(recipe, "unsigned weights", (*place, "checkpoint"), clause, advice)
    reason = reason_against(model, form)
    if reason is None:
        return
    if weights is None:
        raise recipe.error(
            (*place, "weights"),
            f"is not set, and {reason}; set it, as to {{type: int8, requantize: true}}, to round such weights again",
        )
    raise recipe.error(
        (*place, "weights", "requantize"),
        f"is false, and {reason}; set it to true to round such weights again, or give another checkpoint",
    )


def _quantize(design: PlanDesign, graphs: Mapping[str, ir.Model]) -> list[RuleReport]:
    """Quantise the weights of the models whose recipe or checkpoint has them so."""
    sections = {names.TARGET: design.recipe.target} | {each.section.name: each.section for each in design.sources}
    forms = {name: section.weights.form if section.weights else None for name, section in sections.items()}
    reports = [quantize(name, graphs[name], form) for name, form in forms.items()]
    return [report for report in reports if report.applied or report.declined]


def _write_engines(
    design: PlanDesign, backend: Backend, graphs: Mapping[str, ir.Model], root: Path, steps: _Steps
) -> Engines:
    """Lower copies of the graphs for one backend, and write its engines and kernels."""
    place = root / "engines" / backend.kind
    place.mkdir(parents=True)
    recipe = design.recipe
    folder = backend.open_folder(
        place,
        lambda text: steps.detail(f"{backend.kind}: {text}"),
        recipe.cache_path(backend),
        recipe.dtype(backend),
    )
    engines: dict[str, Engine] = {}
    reports: list[RuleReport] = []
    decide = deciding_engines(design.drafters) if backend.support.exact else []
    deciding: dict[str, ir.Model] = {}
    with closing(folder):
        for name, graph in graphs.items():
            steps.begin(f"{backend.kind}: lowering {name} and writing its engine")
            own = graph.clone()
            held = _take_into(own, name, design, backend) if folder.takes_ops(graph) else ()
            caches = 1 + (design.partial is not None and name == names.TARGET)
            rows = design.limits[name][names.ROWS]
            reports += lower(name, own, backend.kind, rows=rows, caches=caches, kv_cache=recipe.kv_dtype(backend))
            engines[name] = folder.write(name, own, design.limits[name]).model_copy(update={"holds": held})
            if name in decide:
                deciding[name] = own  # its large weights are in the file by now
    probe = write_probe(deciding, place) if deciding else None
    return Engines(engines, tuple(reports), _compile_kernels(backend, root, steps), probe)


def _take_into(graph: ir.Model, model: str, design: PlanDesign, backend: Backend) -> tuple[str, ...]:
    """Inline the ops around the engine of `model` into its graph, and return their names."""
    drafter = next((d for d in design.drafters if isinstance(d, GraphDrafter) and d.name == model), None)
    free = {names.ATTN_BIAS: names.FREE_BIAS} if drafter is None else {}
    buffers = {tensor.name: tensor for tensor in design.buffers(backend)}
    return inline_stages(graph, *stages_around(model, drafter), buffers, free)


def _backend_plan(design: PlanDesign, backend: Backend, built: Engines, key: str) -> BackendPlan:
    """Put the engines together with the buffers and programs that run them."""
    return BackendPlan(
        engines=built.engines,
        engines_key=key,
        buffers=design.buffers(backend),
        views=design.views,
        symbols=design.limits,
        programs=emit_programs(built.engines, design),
        lowering=built.reports,
        kernels=built.kernels,
        probe=built.probe,
        buckets=step_buckets(design, built.engines) if built.kernels else {},
    )


def _compile_kernels(backend: Backend, root: Path, steps: _Steps) -> dict[str, str]:
    """Compile our ops' kernels for a backend's devices, files by architecture; backends of one plan share them."""
    files: dict[str, str] = {}
    source, folder = backend.kernels
    for architecture in backend.architectures:
        files[architecture] = f"{folder}/{architecture}.cubin"
        path = root / files[architecture]
        if not path.exists():
            steps.detail(f"{backend.kind}: compiling the ops for {architecture}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(compile_kernels(architecture, source))
    return files


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
    """Return the existing plan with its manifest's `source` set to the recipe of this build."""
    if plan.manifest.source == source:
        return plan
    manifest = plan.manifest.model_copy(update={"source": source})
    with place.workplace() as temporary:
        _write_manifest(manifest, temporary).replace(plan.root / MANIFEST)
    return Plan(plan.root, manifest)
