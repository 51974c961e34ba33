"""Sizes of a step as polynomials of its symbols, so that equal shapes are known to be equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from outrider.plans import names

_Monomial = tuple[str, ...]  # symbols, sorted; empty for a constant


@dataclass(frozen=True)
class Size:
    """A sum of products of symbols, each with a factor."""

    terms: tuple[tuple[_Monomial, int], ...]

    @property
    def number(self) -> int | None:
        """The value of a constant, None of what depends on a symbol."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def __add__(self, other: Size | int) -> Size:
        return _size([*self.terms, *size(other).terms])

    __radd__ = __add__

    def __sub__(self, other: Size | int) -> Size:
        return self + size(other) * -1

    def __rsub__(self, other: int) -> Size:
        return size(other) - self

    def __mul__(self, other: Size | int) -> Size:
        return _size((tuple(sorted(a + b)), x * y) for a, x in self.terms for b, y in size(other).terms)

    __rmul__ = __mul__

    def divided(self, by: Size) -> Size | None:
        """Return the quotient where the division by one product leaves nothing over, else None."""
        if len(by.terms) != 1:
            return size(1) if by == self else None
        (divisor, factor), quotient = by.terms[0], list[tuple[_Monomial, int]]()
        for monomial, number in self.terms:
            rest = list(monomial)
            for symbol in divisor:
                if symbol not in rest:
                    return None
                rest.remove(symbol)
            if number % factor:
                return None
            quotient.append((tuple(rest), number // factor))
        return _size(quotient)

    def __str__(self) -> str:
        """Return the formula of the size (`plans.formulas`)."""
        if not self.terms:
            return "0"
        return " + ".join(
            " * ".join([*([str(number)] if number != 1 or not monomial else []), *monomial])
            for monomial, number in self.terms
        )


def size(value: Size | int | str) -> Size:
    """Return the size of a number or a symbol. E, the edges of rows, is R + 1."""
    if isinstance(value, Size):
        return value
    if isinstance(value, int):
        return _size([((), value)])
    if value == names.ROW_EDGES:
        return _size([((names.ROWS,), 1), ((), 1)])
    return _size([((value,), 1)])


def product(sizes: Iterable[Size]) -> Size:
    return reduce(lambda a, b: a * b, sizes, size(1))


def quotient(dividend: Size, divisor: int) -> str:
    """Return the formula of a quotient rounded up."""
    number = dividend.number
    return str(-(-number // divisor)) if number is not None else f"({dividend} + {divisor - 1}) // {divisor}"


def largest(value: Size, limits: Mapping[str, int]) -> int:
    """Return a bound of the value: what is subtracted counts as nothing."""
    total = 0
    for monomial, number in value.terms:
        total += max(number, 0) * reduce(lambda a, symbol: a * limits[symbol], monomial, 1)
    return total


def least(value: Size) -> int:
    """Return a bound of the value from below: every symbol is 1 or more, but for sums that subtract one."""
    subtracts = any(number < 0 and monomial for monomial, number in value.terms)
    return 0 if subtracts else sum(number for _, number in value.terms)


def _size(terms: Iterable[tuple[_Monomial, int]]) -> Size:
    found: dict[_Monomial, int] = {}
    for monomial, number in terms:
        found[monomial] = found.get(monomial, 0) + number
    return Size(tuple(sorted((m, n) for m, n in found.items() if n)))
