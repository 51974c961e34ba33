"""Integer formulas over sizes of a step, such as "(N * 4 + 255) // 256": text in a plan, evaluated in a step.

A formula has integers, names, + - * // %, min(a, b) and max(a, b). Nothing of it is run as code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache

Sizes = Mapping[str, int]
_Value = Callable[[Sizes], int]
_DEEPEST = 60  # operations within one another: 500 would come to Python's own limit
_LONGEST = 500  # characters; far above any formula of ours

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {"min": min, "max": max}


class Formula:
    """A formula, read once. Raises `ValueError` for text that is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: frozenset[str]
        """Sizes that it asks for."""
        if len(text) > _LONGEST:
            raise ValueError(f"a formula of {len(text)} characters is longer than {_LONGEST}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text!r} is no formula: {error}") from None
        names = set[str]()
        self._value = _read(tree.body, text, names, _DEEPEST)
        self.names = frozenset(names)

    def value(self, sizes: Sizes) -> int:
        """Evaluate for `sizes`. Raises `KeyError` for a size that is missing, `ValueError` for a division by zero."""
        try:
            return self._value(sizes)
        except ZeroDivisionError:
            raise ValueError(f"{self.text!r} divides by zero") from None


@cache
def formula(text: str) -> Formula:
    """Return the formula of a text; equal texts share one. Raises `ValueError` as `Formula` does."""
    return Formula(text)


def _read(node: ast.expr, text: str, names: set[str], deeper: int) -> _Value:
    if deeper == 0:
        raise ValueError(f"{text!r} is no formula: more than {_DEEPEST} operations are within one another")

    def read(part: ast.expr) -> _Value:
        return _read(part, text, names, deeper - 1)

    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return lambda sizes: number
        case ast.Name(id=name):
            names.add(name)
            return lambda sizes: sizes[name]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATIONS:
            return _apply(_OPERATIONS[type(operator)], read(left), read(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = read(operand)
            return lambda sizes: -value(sizes)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _FUNCTIONS:
            return _apply(_FUNCTIONS[name], read(left), read(right))
    raise ValueError(f"{text!r} is no formula: {ast.unparse(node)!r} is not allowed")


def _apply(function: Callable[[int, int], int], left: _Value, right: _Value) -> _Value:
    return lambda sizes: function(left(sizes), right(sizes))
