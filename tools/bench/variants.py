"""The plan that a comparison of drafts runs on.

A draft's shape is compiled into its engine, and into what a session allocates. Other shapes than the plan's own are
therefore built, into a temporary plan that holds each drafter once for each shape: one process measures all of them
beside one plain decoding. A process of its own builds, so that its memory is not counted as the runtime's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.markup import escape

from outrider.commands.console import stderr
from outrider.compiler.block_layouts import layout_of, read_layout
from outrider.compiler.formats.gguf_file import is_gguf
from outrider.compiler.models.config import DecoderConfig, read_folder_config
from outrider.compiler.models.config_reader import read_json
from outrider.compiler.recipe import Recipe, check_same_recipe, load_recipe, source_recipe
from outrider.compiler.recipe_drafters import BlockSection, reshaped
from outrider.plans.errors import OutriderError
from outrider.plans.manifest import Drafter, Manifest
from outrider.plans.pass_prices import read_pass_prices, write_pass_prices
from outrider.plans.plan import read_manifest
from outrider.runtime.backends import choose_backend
from outrider.tools.bench.shapes import (
    PLAIN_DECODING,
    Shape,
    Variant,
    choose_drafters,
    choose_shapes,
    own_shape,
    within_block,
)

_PROGRESS = "building:"  # how the compiler's lines of progress begin, where it writes to no terminal


@contextmanager
def plan_to_measure(options: argparse.Namespace) -> Iterator[tuple[Path, list[Variant]]]:
    """The plan that holds every variant, and these, plain decoding first: the user's own where that will do.

    What is asked of a block drafter beyond its block ends with the block. A table of prices that holds for the user's
    plan holds for a temporary one, whose target is the same.
    """
    manifest = read_manifest(options.plan)
    shaped = choose_shapes(choose_drafters(manifest.drafters, options.drafters), options.tree, options.depth)
    recipe = None if _all_own(shaped) else _read_recipe(options, manifest)
    if recipe is not None:
        drafted = {d.name: tokens_of_block(recipe, d) for d in recipe.drafters if isinstance(d, BlockSection)}
        shaped = [(d, within_block(shapes, drafted[d.name]) if d.name in drafted else shapes) for d, shapes in shaped]
    if recipe is None or _all_own(shaped):
        yield options.plan, [PLAIN_DECODING, *(Variant.from_drafter(drafter, drafter.name) for drafter, _ in shaped)]
        return
    prices = read_pass_prices(options.plan)
    with TemporaryDirectory(prefix="outrider-bench-") as folder:
        plan = Path(folder) / "plan"
        origins = _build(options, manifest, recipe, shaped, plan)
        built = read_manifest(plan)
        if prices is not None and prices.identity == manifest.identity:
            write_pass_prices(prices.model_copy(update={"identity": built.identity}), plan)
        measured = (Variant.from_drafter(d, origins[d.name]) for d in built.drafters if d.name in origins)
        yield plan, [PLAIN_DECODING, *measured]


def tokens_of_block(recipe: Recipe, section: BlockSection) -> int:
    """How many tokens a block of the head drafts. Its tensors are not read. Raises `CheckpointError`."""
    file = recipe.drafter_path(section) / "config.json"
    raw = read_json(file)
    return read_layout(file, raw, layout_of(file, raw), _target_config(recipe), own_embedding=False).drafted


def _target_config(recipe: Recipe) -> DecoderConfig:
    if not is_gguf(recipe.checkpoint_path):
        return read_folder_config(recipe.checkpoint_path, recipe.rope_scaling)
    from outrider.compiler.opening import read_config  # loads PyTorch, whose memory would be counted as the runtime's

    return read_config(recipe.checkpoint_path, recipe.rope_scaling)


def _all_own(shaped: Sequence[tuple[Drafter, list[Shape]]]) -> bool:
    return all(shapes == [own_shape(drafter)] for drafter, shapes in shaped)


def _read_recipe(options: argparse.Namespace, manifest: Manifest) -> Recipe:
    if options.recipe is None:
        recipe = source_recipe(options.plan, option="--recipe FILE", overrides=options.overrides)
    else:
        recipe = load_recipe(options.recipe, options.overrides)
    check_same_recipe(recipe, options.plan, manifest)
    return recipe


def _build(
    options: argparse.Namespace,
    manifest: Manifest,
    recipe: Recipe,
    shaped: Sequence[tuple[Drafter, list[Shape]]],
    out: Path,
) -> dict[str, str]:
    """Build the plan of all shapes at `out`; by the name of each, that of the drafter it was made of."""
    sections = {section.name: section for section in recipe.drafters}
    origins: dict[str, str] = {}
    listed = []
    for drafter, shapes in shaped:
        for index, shape in enumerate(shapes, start=1):
            name = f"{drafter.name}.{index}"
            origins[name] = drafter.name
            listed.append(reshaped(sections[drafter.name], name, shape))
    after = {section["otherwise"] for section in listed if section.get("otherwise") is not None}
    listed += [sections[str(name)].model_dump(mode="json", exclude_none=True) for name in sorted(map(str, after))]
    overrides = [*options.overrides, f"drafters={json.dumps(listed, ensure_ascii=False)}"]
    load_recipe(recipe.path, overrides)
    backend = choose_backend(manifest.backends, options.backend).backend
    command = [
        sys.executable,
        "-m",
        "outrider.compiler",
        "build",
        str(recipe.path.resolve()),
        "--out",
        str(out),
        "--json",
    ]
    command += ["--backend", backend, *(word for override in overrides for word in ("--set", override))]
    title = f"building a plan of {len(listed)} drafts"
    with stderr.status(title) as status:

        def show(line: str) -> None:
            status.update(f"{title}, {escape(line)}")
            if not stderr.is_terminal:
                stderr.print(f"{title}, {line}", markup=False, soft_wrap=True)

        code, last_words = _run(command, show)
    if code:
        raise OutriderError(f"A plan of {', '.join(origins)} cannot be built: {last_words.removeprefix('error: ')}")
    return origins


def _run(command: Sequence[str], show: Callable[[str], None]) -> tuple[int, str]:
    """Run the compiler; its lines of progress go to `show` as they come. Its exit status and its last words."""
    last_words = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            for line in filter(None, map(str.strip, process.stderr)):
                last_words = line
                if line.startswith(_PROGRESS):
                    show(line.removeprefix(_PROGRESS).strip())
        except BaseException:  # such as an interrupt: nobody waits for the plan any more
            process.kill()
            raise
    return process.returncode, last_words or f"exit status {process.returncode}"
