"""A copy of a recipe with another draft tree: the text edited in place, so that comments and layout stay."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from outrider.compiler.recipe import Recipe, load_recipe
from outrider.compiler.recipe_drafters import ModelSection, TreeSection
from outrider.plans.errors import RecipeError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import Tree

_Edit = tuple[int, int, str]  # replace text[start:stop] by this


class RecipeCopy:
    """A copy of the recipe at `recipe`, to be written to `out` with another tree for `drafter`."""

    def __init__(self, recipe: Path, out: Path, drafter: str) -> None:
        """Raise `RecipeError` where the copy could not be written."""
        if out.resolve() == recipe.resolve():
            raise RecipeError(f"{out} is the recipe itself; choose another --out for the copy")
        if out.is_dir() or not os.access(out.parent, os.W_OK):
            raise RecipeError(f"{out} cannot be written; choose another --out, a file in a folder that is there")
        self._text = recipe.read_bytes().decode("utf-8")
        self._top = yaml.compose(self._text, Loader=yaml.SafeLoader)
        self._node = _drafter(self._top, recipe, drafter)
        self._recipe, self._out, self._drafter = recipe, out, drafter

    def write(self, tree: Tree) -> None:
        """Write the copy; relative paths keep their meaning, and a chain stays `gamma` where the recipe had `gamma`.

        The written file is read and checked before it replaces `out`. Raises `RecipeError`.
        """
        out, text = self._out, self._text
        edits = [*_tree_edits(self._node, tree), *_path_edits(self._top, self._recipe.parent, out.parent)]
        for start, stop, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[stop:]
        written = out.with_name(f".{out.name}.writing-{os.getpid()}")
        try:
            written.write_bytes(text.encode("utf-8"))
            _check(load_recipe(written), self._drafter, tree)
            written.replace(out)
        except OSError as error:
            raise RecipeError(f"{out} cannot be written ({error.strerror or error}); choose another --out") from None
        finally:
            written.unlink(missing_ok=True)


def _items(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield the keys of a mapping, each with its node and its value's node."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield str(key.value), key, value


def _entries(top: yaml.Node | None, of: str) -> Iterator[yaml.Node]:
    for key, _, value in _items(top):
        if key == of and isinstance(value, yaml.SequenceNode):
            yield from value.value


def _drafter(top: yaml.Node | None, recipe: Path, name: str) -> yaml.Node:
    for node in _entries(top, "drafters"):
        if any(key == "name" and value.value == name for key, _, value in _items(node)):
            return node
    raise RecipeError(f"{recipe} has no drafter {name!r} (--set gave it?); write it into the recipe")


def _tree_edits(drafter: yaml.Node, tree: Tree) -> Iterator[_Edit]:
    flow = f"{{top_k: {tree.top_k}, depth: {tree.depth}, nodes: {tree.nodes}}}"
    found = {key: (name, value) for key, name, value in _items(drafter)}
    gamma, shape = (found[key][1] if key in found else None for key in ("gamma", "tree"))
    if isinstance(shape, yaml.MappingNode):
        for key, _, size in _items(shape):
            yield _span(size, str(getattr(tree, key)))
    elif gamma is not None and gamma.tag != "tag:yaml.org,2002:null" and tree.top_k == 1:
        yield _span(gamma, str(tree.depth + 1))
    elif shape is not None:  # auto, or null
        yield _span(shape, flow)
        if gamma is not None:
            yield _span(gamma, "null")
    elif gamma is not None:
        yield _span(found["gamma"][0], "tree")
        yield _span(gamma, flow)
    else:
        name, _ = found["checkpoint"]
        at = name.start_mark
        inline = isinstance(drafter, yaml.MappingNode) and drafter.flow_style
        yield at.index, at.index, f"tree: {flow}, " if inline else f"tree: {flow}\n{' ' * at.column}"


def _path_edits(top: yaml.Node | None, old: Path, new: Path) -> Iterator[_Edit]:
    """Yield edits that make relative paths relative to the copy's folder."""
    if old.resolve() == new.resolve():
        return
    sections = [value for key, _, value in _items(top) if key == "target"]
    paths = [value for key, _, value in _items(top) if key == "held_out"]
    sections += [*_entries(top, "drafters"), *_entries(top, "backends")]
    sections += [value for section in sections for key, _, value in _items(section) if key == "weights"]
    kinds = ("checkpoint", "calibration", "timing_cache")
    paths += [value for section in sections for key, _, value in _items(section) if key in kinds]
    for value in paths:
        written = os.path.expanduser(value.value)
        if isinstance(value, yaml.ScalarNode) and value.value and not os.path.isabs(written):
            there = os.path.relpath((old / written).resolve(), new.resolve())
            yield _span(value, json.dumps(there, ensure_ascii=False))


def _span(node: yaml.Node, new: str) -> _Edit:
    """Return the edit that puts `new` in the place of a value; an empty value stands right after its colon."""
    start, stop = node.start_mark.index, node.end_mark.index
    return start, stop, new if stop > start else f" {new}"


def _check(copy: Recipe, drafter: str, tree: Tree) -> None:
    section = next((d for d in copy.drafters if d.name == drafter), None)
    if section is not None and not isinstance(section, HostDrafter):
        if isinstance(section.tree, TreeSection) and section.tree.tree() == tree:
            return
        if isinstance(section, ModelSection) and section.gamma == tree.depth + 1 and tree.top_k == 1:
            return
    raise RecipeError(
        f"the copy does not hold the tree of {drafter!r} that was to be written; write it by hand: {tree}"
    )
