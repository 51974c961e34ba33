"""Integer formulas of sizes that are known only when an engine runs, for the grids and arguments of plugins.

A launch's `blocks` is a function of sizes. Called with `Size`s it returns its own formula, which is then evaluated with
sizes of either kind: integers, or TensorRT's symbolic dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar


class Factor(Protocol):
    """A type of sizes: its values can be multiplied with each other."""

    def __mul__(self, other: Self, /) -> Self: ...


D = TypeVar("D", bound=Factor)


@dataclass(frozen=True)
class Arithmetic(Generic[D]):
    """Makes sizes of one kind from integers, and divides them by an integer, rounding up."""

    constant: Callable[[int], D]
    ceil_quotient: Callable[[D, int], D]


INTEGERS: Arithmetic[int] = Arithmetic(constant=int, ceil_quotient=lambda size, divisor: -(-size // divisor))


class Expression:
    """A formula of sizes: products, and quotients rounded up, spelled -(-a // b); no other operation exists."""

    def value(self, sizes: Mapping[str, D], arithmetic: Arithmetic[D]) -> D:
        """Return the formula's value for `sizes`. Raises KeyError for a missing size."""
        raise NotImplementedError

    def __mul__(self, other: Expression | int) -> Expression:
        return Product(self, expression_of(other))

    __rmul__ = __mul__

    def __neg__(self) -> Expression:
        return Negative(self)


def expression_of(number: Expression | int) -> Expression:
    return Constant(number) if isinstance(number, int) else number


@dataclass(frozen=True)
class Constant(Expression):
    number: int

    def value(self, sizes: Mapping[str, D], arithmetic: Arithmetic[D]) -> D:
        return arithmetic.constant(self.number)


@dataclass(frozen=True)
class Size(Expression):
    symbol: str

    def value(self, sizes: Mapping[str, D], arithmetic: Arithmetic[D]) -> D:
        return sizes[self.symbol]


@dataclass(frozen=True)
class Product(Expression):
    left: Expression
    right: Expression

    def value(self, sizes: Mapping[str, D], arithmetic: Arithmetic[D]) -> D:
        return self.left.value(sizes, arithmetic) * self.right.value(sizes, arithmetic)


@dataclass(frozen=True)
class CeilQuotient(Expression):
    dividend: Expression
    divisor: int

    def value(self, sizes: Mapping[str, D], arithmetic: Arithmetic[D]) -> D:
        return arithmetic.ceil_quotient(self.dividend.value(sizes, arithmetic), self.divisor)


@dataclass(frozen=True)
class Negative(Expression):
    """An intermediate step to a quotient that is rounded up; it has no value, because dimensions are never negative."""

    positive: Expression

    def __mul__(self, other: Expression | int) -> Expression:
        return Negative(self.positive * other)

    __rmul__ = __mul__

    def __neg__(self) -> Expression:
        return self.positive

    def __floordiv__(self, divisor: int) -> Expression:
        return Negative(CeilQuotient(self.positive, divisor))
