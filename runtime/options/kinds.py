"""Kinds of values that options take. A kind knows its limits, and what every interface makes of them:

- Python: `check` returns the value as the runtime reads it, or raises RequestError with what to pass instead;
- the server: `annotation`, a type for Pydantic, whose description is `what`;
- the C library: `c`, the call that sets the option;
- the command line: `cli/arguments.py` spells each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from outrider.plans.errors import RequestError
from outrider.plans.text_check import check_text
from outrider.runtime.numbers import as_real, shown

INT64_MAX = 2**63 - 1
Call = Literal["int", "double", "bool", "text", "json", "texts", "ints"]
"""What sets an option of a kind in C: a call for a value, `text` for JSON too, or one that adds to a list."""


class Kind:
    """Values of any kind, which this class does not check."""

    what = "a value"
    """What to pass, as a noun phrase."""
    c: Call | None = None
    annotation: Any = Any

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> Any:
        """Return `given`, the value of the option `name`; token ids are below `vocab_size`. Raises RequestError."""
        return given

    def _refuse(self, given: object, name: str) -> RequestError:
        return RequestError(f"{name} is {shown(given)}; pass {self.what}.")

    def _listed(self, given: object, name: str) -> tuple[Any, ...]:
        """Return the elements of a list, which may be read again: an iterator would serve one request of several."""
        try:
            if isinstance(given, Collection) and not isinstance(given, str | bytes | Mapping):
                return tuple(given)
        except TypeError:  # an array without dimensions
            pass
        raise self._refuse(given, name)


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number, NumPy's too, or one of some `words`."""

    least: int = 0
    most: int = INT64_MAX
    words: tuple[str, ...] = ()
    c = "int"

    @property
    def what(self) -> str:  # type: ignore[override]
        limits = f"of at least {self.least}" if self.most == INT64_MAX else f"from {self.least} to {self.most}"
        return " or ".join([f"a whole number {limits}", *self.words])

    @property
    def annotation(self) -> Any:
        whole: Any = Annotated[int, Field(ge=self.least, le=self.most)]
        return whole | Literal[self.words] if self.words else whole

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> Any:
        if isinstance(given, str) and given in self.words:
            return given
        whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
        if whole and given > self.most == INT64_MAX:  # which `what` leaves out
            raise RequestError(f"{name} is {shown(given)}; pass a whole number of at most {self.most}.")
        if not whole or not self.least <= given <= self.most:
            raise self._refuse(given, name)
        return int(given)


@dataclass(frozen=True)
class Real(Kind):
    """A finite number from `least`, or above `above`, to `most`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    c = "double"

    @property
    def what(self) -> str:  # type: ignore[override]
        if self.least is not None:
            limits = f" of at least {self.least:g}" if self.most is None else f" from {self.least:g} to {self.most:g}"
        else:
            limits = f" above {self.above:g}" + ("" if self.most is None else f" and at most {self.most:g}")
        return f"a number{limits}"

    @property
    def annotation(self) -> Any:
        return Annotated[float, Field(ge=self.least, le=self.most, gt=self.above)]

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> float:
        found = as_real(given)
        if (
            found is None
            or (self.least is not None and found < self.least)
            or (self.most is not None and found > self.most)
            or (self.above is not None and found <= self.above)
        ):
            raise self._refuse(given, name)
        return found


class Switch(Kind):
    """True or false."""

    what, c, annotation = "true or false", "bool", bool

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> bool:
        if not isinstance(given, bool | np.bool_):
            raise self._refuse(given, name)
        return bool(given)


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words."""

    words: tuple[str, ...]
    c = "text"

    @property
    def what(self) -> str:  # type: ignore[override]
        return f"one of {', '.join(self.words)}"

    @property
    def annotation(self) -> Any:
        return Literal[self.words]

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> str:
        if not isinstance(given, str) or given not in self.words:
            raise self._refuse(given, name)
        return given


@dataclass(frozen=True)
class Text(Kind):
    """A text of at most `most` characters."""

    most: int
    what: str = ""
    c = "text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", self.what or f"a text of at most {self.most} characters")

    @property
    def annotation(self) -> Any:
        return Annotated[str, Field(max_length=self.most)]

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> str:
        if not isinstance(given, str) or len(given) > self.most:
            raise self._refuse(given, name)
        check_text(given, name)
        return given


@dataclass(frozen=True)
class Texts(Kind):
    """At most `most` texts, or one `alone`, each of 1 to `most_bytes` bytes of UTF-8; if `printing`, not of spaces."""

    most: int
    most_bytes: int
    printing: bool = False
    alone: bool = True
    c = "texts"

    @property
    def what(self) -> str:  # type: ignore[override]
        one = "a text, or " if self.alone else ""
        return f"{one}a list of at most {self.most} texts of at most {self.most_bytes} bytes"

    @property
    def annotation(self) -> Any:
        return str | list[Any] if self.alone else list[Any]

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> tuple[str, ...]:
        texts = (given,) if self.alone and isinstance(given, str) else self._listed(given, name)
        if len(texts) > self.most:
            raise RequestError(f"{name} holds more than {self.most} texts; pass at most {self.most}.")
        for place, text in enumerate(texts):
            where = f"{name}[{place}]"
            if not isinstance(text, str) or not (text.strip() if self.printing else text):
                least = "that is more than white space" if self.printing else "of at least one character"
                raise RequestError(f"{where} is {shown(text)}; pass a text {least}.")
            check_text(text, where)
            if (size := len(text.encode())) > self.most_bytes:
                raise RequestError(f"{where} has {size} bytes; pass a text of at most {self.most_bytes}.")
        return texts


@dataclass(frozen=True)
class TokenIds(Kind):
    """Token ids of the vocabulary, at least `least` of them."""

    least: int = 0
    c = "ints"
    annotation = list[Any]

    @property
    def what(self) -> str:  # type: ignore[override]
        return "a list of at least one token id" if self.least else "a list of token ids"

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> tuple[int, ...]:
        listed = self._listed(given, name)
        if len(listed) < self.least:
            raise self._refuse(given, name)
        return tuple(_token_id(each, name, vocab_size) for each in listed)


@dataclass(frozen=True)
class Biases(Kind):
    """Numbers of at most `most`, and at least its negative, by token id; ids may be texts, as JSON's keys are."""

    most: float
    c, annotation = "json", dict[str, Any]
    what = 'numbers by token id, such as {"50256": -100}'

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> dict[int, float]:
        if not isinstance(given, Mapping):
            raise self._refuse(given, name)
        bias, found = Real(-self.most, self.most), {}
        for key, value in given.items():
            spelled = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
            token = _token_id(int(key) if spelled else key, name, vocab_size)
            found[token] = bias.check(value, f"{name}[{token}]")
        return found


@dataclass(frozen=True)
class Object(Kind):
    """An object of JSON, which what it is for checks."""

    what: str
    c = "json"


@dataclass(frozen=True)
class Instance(Kind):
    """An object of a class of Python's."""

    type: type
    what: str

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> Any:
        if not isinstance(given, self.type):
            raise RequestError(f"{name} is of type {type(given).__name__}; pass {self.what}.")
        return given


@dataclass(frozen=True)
class Function(Kind):
    """A function of Python's."""

    what: str

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> Callable[..., Any]:
        if not callable(given):
            raise RequestError(f"{name} is of type {type(given).__name__}; pass {self.what}.")
        found: Callable[..., Any] = given
        return found


@dataclass(frozen=True)
class Functions(Kind):
    """Functions of Python's; C adds them by a call of their own."""

    what: str

    def check(self, given: Any, name: str, vocab_size: int | None = None) -> Sequence[Callable[..., Any]]:
        found = self._listed(given, name)
        if not all(map(callable, found)):
            raise self._refuse(given, name)
        return found


def _token_id(given: object, name: str, vocab_size: int | None) -> int:
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
        raise RequestError(f"{name} holds {shown(given)}; pass token ids, whole numbers of at least 0.")
    if vocab_size is not None and given >= vocab_size:
        raise RequestError(
            f"{name} holds {shown(given)}, which is not in the vocabulary; ids go from 0 to {vocab_size - 1}."
        )
    return int(given)
