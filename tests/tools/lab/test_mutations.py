"""Mutations of a module: each changes one place, and the same seed the same places."""

from __future__ import annotations

import ast
from pathlib import Path

from outrider.tools.lab.mutations import FILES, choose, mutations

SOURCE = """
def f(a, b):
    if a is None and b > 2:
        return a + b
    return "1" if a else b
"""


def test_each_changes_one_place() -> None:
    found = [(line, source.splitlines()) for line, source in mutations(SOURCE)]
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    changed = {next(after for before, after in zip(plain, lines, strict=True) if before != after) for _, lines in found}
    assert {sum(a != b for a, b in zip(plain, lines, strict=True)) for _, lines in found} == {1}
    assert {each.strip() for each in changed} == {
        "if a is None or b > 2:", "if a is not None and b > 2:", "if a is None and b >= 2:", "if a is None and b > 3:",
        "if not (a is None and b > 2):", "return a - b", "return '1' if not a else b",
    }  # fmt: skip


def test_the_same_seed_chooses_the_same_places_of_this_checkout() -> None:
    root = Path(__file__).parents[3]
    first, again = ([each[:3] for each in choose(root, 13, seed)] for seed in (1, 1))
    assert first == again
    assert len(first) == 13
    assert len({tuple(tests) for _, tests, _ in first}) == len(FILES)
    assert all(tests for _, tests, _ in first)
