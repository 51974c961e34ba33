"""Plans of the toy that tests marked `gpu` run.

`python -m tests.integration.gpu_plans FOLDER sm_90` makes those of the backend `cuda` where there is no GPU; on the
machine that has one, with OUTRIDER_MADE=FOLDER, the tests find them there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from tests.conftest import EVERYTHING, made_in, write_toy

OVERRIDES = {"toy": [], "everything": EVERYTHING}
Once = Callable[[str, Callable[[Path], object]], Path]


def gpu_plan(once: Once, what: str, backend: str, architecture: str) -> Path:
    """Return the plan of one of `OVERRIDES`; `once` makes a file or folder of a name where it is not there yet."""
    recipe = once("toy", write_toy) / "model.yaml"
    target = f"backends=[{{kind: {backend}, compute_capabilities: [{architecture}]}}]"
    own = load_recipe(recipe, [*OVERRIDES[what], target])
    return once(f"{what}-{backend}-{architecture}", lambda out: build(own, recipe, out))


def main(folder: Path, architecture: str) -> None:
    once = partial(made_in, folder)
    recipe = once("toy", write_toy) / "model.yaml"
    once("toy/plan", lambda out: build(load_recipe(recipe), recipe, out))
    for what in OVERRIDES:
        gpu_plan(once, what, "cuda", architecture)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
