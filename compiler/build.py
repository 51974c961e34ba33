"""Recipe to plan: everything `python -m compiler build` does, in order."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compiler.checkpoint import checkpoint_hashes, load_decoder
from compiler.engines.onnxruntime import WeightFile, write_engine
from compiler.export import export_target
from compiler.identity import digest, engines_key, tool_versions
from compiler.lowering import lower
from compiler.models.config import DecoderConfig, read_config
from compiler.models.decoder import Decoder
from compiler.programs import cache_views, emit_programs, symbol_limits
from compiler.recipe import Recipe, check_capacity
from compiler.text import write_tokenizer
from plans.buffers import DType
from plans.errors import OutriderError, PlanError
from plans.manifest import FORMAT_VERSION, Geometry, Manifest, NgramDrafter, PlanFile, TargetPlan
from plans.plan import MANIFEST, Plan, file_sha256, open_plan
from plans.step_buffers import step_buffers

VIEW_BUCKET = 128  # keys: coarse enough that sizes rarely change, fine enough that masks stay short

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """A finished build. `reused` names what an earlier build of the same place gave: "plan" or targets."""

    plan: Plan
    reused: tuple[str, ...]


def build(recipe: Recipe, recipe_path: Path, out: Path, progress: Progress = lambda _: None) -> Built:
    """Build the plan of `recipe` at `out`; `progress` is told what begins.

    An unchanged plan at `out` is kept, unchanged engines are taken over. The plan is made beside `out`
    and renamed, so that a failed build leaves `out` as it was. Raises `OutriderError`s.
    """
    config = read_config(recipe.checkpoint_path, recipe.rope_scaling)
    check_capacity(recipe, config)
    _check_dtype(recipe)
    checkpoint = checkpoint_hashes(recipe.checkpoint_path)
    tools = tool_versions()
    identity = digest([FORMAT_VERSION, recipe.resolved(), checkpoint, tools, list(recipe.targets)])
    old = _existing(out)
    if old is not None and old.manifest.identity == identity:
        progress("unchanged: the plan is up to date")
        return Built(_with_source(old, recipe_path), ("plan",))

    geometry = _geometry(recipe, config)
    _remove_abandoned(out)
    temporary = out.parent / f".{out.name}.building-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        drafters = tuple(NgramDrafter(**d.model_dump()) for d in recipe.drafters)
        model = _LazyDecoder(recipe, progress)
        targets, reused = {}, []
        for target in recipe.targets:
            key = engines_key(checkpoint, target, _engine_shape(recipe, geometry), tools)
            taken = _take_over(old, target, key, temporary)
            if taken is not None:
                progress(f"{target}: engines unchanged, taken from the plan that is there")
                reused.append(target)
            targets[target] = _target_plan(target, key, taken, model, geometry, drafters, temporary, progress)
        progress("writing the plan")
        text = write_tokenizer(recipe.checkpoint_path, temporary / "tokenizer", config)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name=recipe.name,
            identity=identity,
            recipe=recipe.resolved(),
            source=os.path.relpath(recipe_path, out),
            model=geometry,
            text=text,
            drafters=drafters,
            targets=targets,
            tools=tools,
            files=_list_files(temporary),
        )
        (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        _swap(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Built(open_plan(out, verify=False), tuple(reused))


class _LazyDecoder:
    """The weights, read when the first engine has to be built, if any."""

    def __init__(self, recipe: Recipe, progress: Progress) -> None:
        self._recipe, self._progress = recipe, progress
        self._decoder: Decoder | None = None

    def get(self) -> Decoder:
        if self._decoder is None:
            self._progress("reading the checkpoint")
            recipe = self._recipe
            self._decoder = load_decoder(recipe.checkpoint_path, recipe.target.dtype, recipe.rope_scaling)
        return self._decoder


def _check_dtype(recipe: Recipe) -> None:
    if "onnxruntime-cpu" in recipe.targets and recipe.target.dtype != "float32":
        raise recipe.error(
            ("target", "dtype"), f"is {recipe.target.dtype}; onnxruntime-cpu computes in float32, set it to float32"
        )


def _geometry(recipe: Recipe, config: DecoderConfig) -> Geometry:
    context = recipe.capacity.context
    rounded = -(-context // VIEW_BUCKET) * VIEW_BUCKET
    return Geometry(
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context=context,
        view_bucket=VIEW_BUCKET,
        capacity=rounded + VIEW_BUCKET,
        prefill_chunk=recipe.capacity.prefill_chunk,
        branches=recipe.capacity.branches,
    )


def _engine_shape(recipe: Recipe, geometry: Geometry) -> dict[str, object]:
    scaling = recipe.target.rope_scaling
    return {
        "capacity": geometry.capacity,
        "dtype": recipe.target.dtype,
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
    }


def _target_plan(
    target: str,
    key: str,
    taken: TargetPlan | None,
    model: _LazyDecoder,
    geometry: Geometry,
    drafters: tuple[NgramDrafter, ...],
    root: Path,
    progress: Progress,
) -> TargetPlan:
    """Engines (built, or `taken` over) and the buffers and programs that run them."""
    if taken is None:
        decoder = model.get()
        progress(f"{target}: exporting the target to ONNX")
        graph = export_target(decoder, geometry.capacity)
        progress(f"{target}: lowering and writing the engine")
        reports = tuple(lower("target", graph, target, rows=1))
        folder = root / "engines" / target
        folder.mkdir(parents=True)
        weights = WeightFile(folder)
        engines = {"target": write_engine(graph, folder, "target", weights)}
        weights.close()
    else:
        engines, reports = taken.engines, taken.lowering
    kv_type = next(t.dtype for t in engines["target"].inputs if t.name in cache_views(geometry))
    return TargetPlan(
        engines=engines,
        engines_key=key,
        buffers=step_buffers(geometry, DType(kv_type)),
        views=cache_views(geometry),
        symbols=symbol_limits(geometry, drafters),
        programs=emit_programs(engines["target"], drafters),
        lowering=reports,
    )


def _existing(out: Path) -> Plan | None:
    """The plan at `out`, if there is a sound one; a folder that is no plan is not ours to replace."""
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise PlanError(f"{out} exists and is not a plan; choose another --out, or remove it")
    if out.exists() and not out.is_dir():
        raise PlanError(f"{out} exists and is not a folder; choose another --out, or remove it")
    try:
        return open_plan(out) if out.is_dir() else None
    except OutriderError:
        return None  # damaged or of another version: built anew


def _take_over(old: Plan | None, target: str, key: str, root: Path) -> TargetPlan | None:
    """Copy a target's engine files from the plan that is there, if they are what would be built."""
    plan = old.manifest.targets.get(target) if old is not None else None
    if old is None or plan is None or plan.engines_key != key:
        return None
    shutil.copytree(old.root / "engines" / target, root / "engines" / target)
    return plan


def _list_files(root: Path) -> tuple[PlanFile, ...]:
    paths = sorted(p for p in root.rglob("*") if p.is_file())
    return tuple(
        PlanFile(path=p.relative_to(root).as_posix(), sha256=file_sha256(p), size=p.stat().st_size) for p in paths
    )


def _with_source(plan: Plan, recipe_path: Path) -> Plan:
    """The plan that is there, pointing to the recipe it was just asked for from."""
    source = os.path.relpath(recipe_path, plan.root)
    if plan.manifest.source == source:
        return plan
    manifest = plan.manifest.model_copy(update={"source": source})
    temporary = plan.root.parent / f".{plan.root.name}.{MANIFEST}-{os.getpid()}"
    temporary.write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    temporary.replace(plan.root / MANIFEST)
    return Plan(plan.root, manifest)


def _remove_abandoned(out: Path) -> None:
    """Temporary folders of builds that were killed: those whose process is gone."""
    for folder in out.parent.glob(f".{out.name}.building-*"):
        try:
            os.kill(int(folder.name.rsplit("-", 1)[1]), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            pass  # the process lives, and is another user's


def _swap(new: Path, out: Path) -> None:
    """Put `new` in the place of `out` by renaming."""
    previous = out.parent / f".{out.name}.previous-{os.getpid()}"
    if out.exists():
        out.rename(previous)
    try:
        new.rename(out)
    except OSError:
        if previous.exists():
            previous.rename(out)
        raise
    shutil.rmtree(previous, ignore_errors=True)
