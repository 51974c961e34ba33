"""Shapes of drafts, as `--tree` and `--depth` ask for them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from outrider.compiler.recipe_drafters import TreeSection
from outrider.plans.errors import RequestError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import Drafter, GraphDrafter, Tree

PLAIN = "none"
_OWN = "own"
_DEEPEST = 64  # what a recipe allows

Shape = Tree | int
"""Of a draft: a tree or, of n-grams, a number of nodes."""


@dataclass(frozen=True)
class Variant:
    """One drafter in one shape. `name` is what the measured plan calls it, `drafter` what the user's plan does.

    `tree` is written as `--tree` takes it, None for drafts that are no trees; `nodes` counts what the target verifies
    at most, the tip included; `depth` the tokens of the longest path after the tip; `acceptance` is as in a recipe.
    Of n-grams with another drafter after them, which `otherwise` names, the two are of the n-grams' own drafts.
    """

    name: str
    drafter: str
    kind: str | None
    tree: str | None
    nodes: int
    depth: int
    acceptance: str | None = None
    otherwise: str | None = None

    @classmethod
    def from_drafter(cls, settings: Drafter, drafter: str) -> Variant:
        """What the plan's `settings` describe, which were made of those of `drafter`."""
        if isinstance(settings, HostDrafter):
            longest = settings.max_draft
            return cls(settings.name, drafter, settings.kind, None, 1 + longest, longest, "coupled", settings.otherwise)
        tree, depth = settings.tree, settings.longest_path
        return cls(settings.name, drafter, settings.kind, write_tree(tree), tree.nodes, depth, settings.acceptance)

    def __str__(self) -> str:
        return self.drafter if self.tree is None else f"{self.drafter} {self.tree}"


PLAIN_DECODING = Variant(PLAIN, PLAIN, None, None, 1, 0)


def write_tree(tree: Tree) -> str:
    return f"{tree.top_k}/{tree.depth}/{tree.nodes}"


def read_trees(text: str) -> tuple[Tree | None, ...]:
    """Trees as TOP_K/DEPTH/NODES, with commas between them, None for `own`; for `add_argument`'s `type`."""
    return tuple(_read_tree(word.strip()) for word in text.split(","))


def _read_tree(word: str) -> Tree | None:
    if word == _OWN:
        return None
    sizes = word.split("/")
    if len(sizes) != 3 or not all(size.isascii() and size.isdigit() for size in sizes):
        raise argparse.ArgumentTypeError(f"{word!r} is no tree; write TOP_K/DEPTH/NODES, such as 2/6/10, or {_OWN}")
    top_k, depth, nodes = map(int, sizes)
    try:
        return TreeSection(top_k=top_k, depth=depth, nodes=nodes).tree()
    except ValidationError as error:
        first = error.errors()[0]
        raise argparse.ArgumentTypeError(f"{word!r}: {' '.join((*map(str, first['loc']), first['msg']))}") from None


def read_depths(text: str) -> tuple[int | None, ...]:
    """Tokens of the longest path, with commas between them, None for `own`; for `add_argument`'s `type`."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word != _OWN and not (word.isascii() and word.isdigit() and 1 <= int(word) <= _DEEPEST):
            raise argparse.ArgumentTypeError(f"{word!r} is neither a number from 1 to {_DEEPEST} nor {_OWN}")
    return tuple(None if word == _OWN else int(word) for word in words)


def choose_drafters(drafters: Sequence[Drafter], wanted: str | None) -> list[Drafter]:
    """Choose drafters that `wanted` lists by name or kind, beside plain decoding, which always runs; without it, all.

    A name goes before a kind that is spelled alike. Raises `RequestError` for what the plan has not.
    """
    if wanted is None:
        return list(drafters)
    chosen: list[Drafter] = []
    for word in (part.strip() for part in wanted.split(",")):
        found = [d for d in drafters if d.name == word] or [d for d in drafters if d.kind == word]
        if not found and word != PLAIN:
            has = ", ".join([*(f"{d.name} ({d.kind})" for d in drafters), PLAIN])
            raise RequestError(f"--drafters names {word!r}, but the plan has {has}; pass names or kinds of those.")
        chosen += [d for d in found if d not in chosen]
    return chosen


def choose_shapes(
    drafters: Sequence[Drafter], trees: Sequence[Tree | None] | None, depths: Sequence[int | None] | None
) -> list[tuple[Drafter, list[Shape]]]:
    """The shapes of every drafter, each once, in the order asked for: its own where it has no others.

    Trees are for drafters that draft trees. A depth is for all: of a tree it changes the levels, of everything else
    the length. Raises `RequestError` where trees are given and no drafter takes one.
    """
    shaped: list[tuple[Drafter, list[Shape]]] = []
    for drafter in drafters:
        own = own_shape(drafter)
        shapes = [own]
        if trees is not None and isinstance(own, Tree):
            shapes = [own if tree is None else tree for tree in trees]
        elif depths is not None:
            shapes = [own if depth is None else _as_deep(own, depth) for depth in depths]
        _check_chains(drafter, shapes)
        shaped.append((drafter, list(dict.fromkeys(shapes))))
    if trees is not None and not any(map(takes_trees, drafters)):
        listed = ", ".join(f"{d.name} ({d.kind})" for d in drafters) or PLAIN
        raise RequestError(
            f"--tree is for drafters that draft trees, and of {listed} none does; choose others with --drafters, or "
            "pass --depth."
        )
    return shaped


def takes_trees(drafter: Drafter) -> bool:
    return isinstance(own_shape(drafter), Tree)


def own_shape(drafter: Drafter) -> Shape:
    if isinstance(drafter, HostDrafter):
        return drafter.max_draft
    return drafter.tree


def within_block(shapes: Sequence[Shape], drafted: int) -> list[Shape]:
    """Shapes of a drafter whose block drafts `drafted` tokens, each once: what is deeper than that ends there."""
    return list(
        dict.fromkeys(
            _as_deep(shape, drafted) if isinstance(shape, Tree) and shape.depth >= drafted else shape
            for shape in shapes
        )
    )


def _as_deep(own: Shape, depth: int) -> Shape:
    """`own` with paths of at most `depth` tokens."""
    if isinstance(own, int):
        return depth
    grown = own.model_copy(update={"depth": depth - 1})
    nodes = depth + 1 if own.top_k == 1 else min(own.nodes, 1 + grown.candidates)
    return grown.model_copy(update={"nodes": nodes})


def _check_chains(drafter: Drafter, shapes: Sequence[Shape]) -> None:
    """Raise `RequestError` where a drafter that is accepted by rejection would get what is no whole chain."""
    if isinstance(drafter, GraphDrafter) and drafter.acceptance == "rejection":
        for tree in shapes:
            if isinstance(tree, Tree) and (tree.top_k > 1 or tree.nodes != tree.depth + 2):
                raise RequestError(
                    f"{drafter.name} is accepted by rejection, which is for whole chains, and {write_tree(tree)} is "
                    f"none; pass such as 1/{tree.depth}/{tree.depth + 2}, or leave {drafter.name} out of --drafters."
                )
