"""Our side of the comparison: a plan that was built from the checkpoint, or one built for the purpose."""

from __future__ import annotations

from pathlib import Path

import yaml

from outrider.commands.console import progress_bar, stderr
from outrider.compiler.build import build
from outrider.compiler.checkpoint import checkpoint_hashes
from outrider.compiler.identity import digest
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import load_recipe, source_recipe
from outrider.plans.errors import PlanError
from outrider.plans.plan import read_manifest
from outrider.tools.lab.peers.engine import Precision, precision_of, weights_section
from outrider.tools.lab.peers.with_outrider import BACKEND

_HELD_OUT = Path(__file__).resolve().parents[3] / "plans" / "reference" / "held_out.jsonl.gz"
_CONTEXT = 4096  # or the model's, where that is less
_GAMMA = 4


def check_plan(plan: Path, checkpoint: Path) -> Precision:
    """Return the precision of the plan's weights. Raise `PlanError` unless it was built from the checkpoint as it is
    now, with float32 engines for the CPU, and its draft models have weights of the same precision."""
    recipe = source_recipe(plan, option="no --plan, and one is built from the checkpoint")
    found = {backend.kind: backend for backend in recipe.backends}.get(BACKEND)
    if found is None or recipe.dtype(found) != "float32":
        raise PlanError(f"{plan} holds no float32 engines for {BACKEND}; leave out --plan, and one is built")
    source = recipe.checkpoint_path
    if source.resolve() != checkpoint.resolve() and checkpoint_hashes(source) != checkpoint_hashes(checkpoint):
        raise PlanError(f"{plan} was built from {source}, whose files differ from those of {checkpoint}; pass that one")
    built = read_manifest(plan).recipe  # with what --set changed
    precision = precision_of(built["target"])
    for drafter in built["drafters"]:
        if drafter["kind"] == "model" and precision_of(drafter) != precision:
            raise PlanError(
                f"{plan} has a target in {precision} and a draft model ({drafter['name']}) in {precision_of(drafter)}; "
                "other engines' are of one precision: leave out --plan, and one is built"
            )
    return precision


def build_plan(checkpoint: Path, draft: Path | None, work: Path, precision: Precision) -> Path:
    """A plan with an n-gram drafter, and the draft model where there is one, both models with weights of `precision`;
    an unchanged one in `work` is kept."""
    checkpoint = checkpoint.resolve()
    drafters: list[dict[str, object]] = [{"name": "ngram", "kind": "ngram"}]
    if draft is not None:
        model = {"name": "model", "kind": "model", "checkpoint": str(draft.resolve()), "gamma": _GAMMA}
        drafters.append(model | weights_section(precision))
    recipe = {
        "name": "peers",
        "target": {"checkpoint": str(checkpoint), "dtype": "float32"} | weights_section(precision),
        "drafters": drafters,
        "capacity": {"context": min(read_config(checkpoint).max_positions, _CONTEXT)},
        "backends": [BACKEND],
        "held_out": str(_HELD_OUT),
    }
    folder = work / f"peers-{digest(recipe)[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    stderr.print(f"no --plan in {precision}: building one of {checkpoint} in {folder}", soft_wrap=True)
    with progress_bar("building") as progress:
        build(load_recipe(path), path, folder / "plan", progress)
    return folder / "plan"
