"""What the rendering of a chat template may do: turns of loops, sizes of what it makes, and the sum of all that it
makes, walks through and compares. Sizes are known before anything is made."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

_LARGEST = 2**22
"""Characters and elements of what a template makes at once."""
MOST_BITS = 2**14
"""Bits of an integer: Python prints fewer, and divides in a time that grows with their square."""
_MOST_WORK = 2**28
"""Characters that a rendering makes, walks through and compares, all in all: a few seconds, and a gigabyte at most."""
ELEMENT = 256
"""Characters for which an element of a list or a mapping counts."""
_MOST_STEPS = 2**18
"""Turns of loops and calls of a rendering: a second or two."""
_MOST_PARTS = 2**18
"""Values in the lists and mappings that are printed or compared at once."""


class _Budget(threading.local):
    """What is left to the rendering of a thread."""

    steps = _MOST_STEPS
    work = _MOST_WORK


_budget = _Budget()


SIZED = (str, bytes, list, tuple)
_HOLDING: tuple[Any, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_SCALAR = frozenset({int, float, bool, type(None)})
_DIGITS = re.compile(r"\d+")
PLAIN = _SCALAR | {str, list, dict, tuple}
_PRINTING = {"tojson", "pprint", "string", "join", "format"}
MAKING = {"tojson", "pprint", "string", "join", "format", "sum", "indent", "wordwrap"}
"""Filters that may make much of a little without an argument."""


def begin_budget() -> None:
    """Give the rendering that this thread begins all that one may do."""
    _budget.steps, _budget.work = _MOST_STEPS, _MOST_WORK


def charge_step() -> None:
    _budget.steps = left = _budget.steps - 1
    if left < 0:
        raise OverflowError(f"it takes more than {_MOST_STEPS} turns of loops and calls")


def check_size(size: int, most: int = _LARGEST) -> None:
    if size > most:
        raise OverflowError(f"what it makes is too large, of the size {size}; the sandbox allows {most}")


def charge(work: int) -> None:
    _budget.work = left = _budget.work - work
    if left < 0:
        raise OverflowError(f"all that it makes and compares is too large; the sandbox allows the size {_MOST_WORK}")


def weigh(value: Any) -> tuple[int, int]:
    """Elements and characters of a value and of what it holds. Raises OverflowError where they are more than is left:
    lists that hold one another twice double them."""
    kind = type(value)
    if kind is str:
        return 0, len(value)
    if kind in _SCALAR:
        return 0, 0
    waiting, elements, characters = [value], 0, 0
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind is str:
            characters += len(each)
            continue
        if kind in _SCALAR:
            continue
        if isinstance(each, str | bytes):
            characters += len(each)
        elif isinstance(each, dict):
            waiting += each
            waiting += each.values()
            elements += 2 * len(each)
        elif isinstance(each, _HOLDING):
            waiting += each
            elements += len(each)
        elif isinstance(each, range):
            elements += len(each)
        elif isinstance(each, Namespace):
            waiting.append(object.__getattribute__(each, "_Namespace__attrs"))
            elements += 1
        if elements > _MOST_PARTS:
            raise OverflowError(f"what it prints or compares is too large, with more than {_MOST_PARTS} parts")
        if elements * ELEMENT + characters > _budget.work:
            charge(_budget.work + 1)
    return elements, characters


def charge_walk(value: Any, weight: int = 1) -> None:
    elements, characters = weigh(value)
    charge(elements * ELEMENT + characters * weight)


def charge_search(name: str, text: str, sought: str) -> None:
    """Charge a method of a text: Python compares short patterns, and those sought from the end, at every place."""
    every = len(sought) if name.startswith("r") or name.endswith("strip") else min(len(sought), 128)
    charge(len(text) * (1 + every // 16))


def charge_comparison(sign: str, left: Any, right: Any) -> None:
    if sign not in ("in", "notin"):
        elements, characters = weigh(left)
        others, more = (0, characters) if right is None else weigh(right)
        charge((elements + others) * ELEMENT + min(characters, more))
    elif isinstance(right, str):
        charge_search("", right, left if isinstance(left, str) else "")
    else:
        charge_walk(left if isinstance(right, dict) else right)


def charge_made(made: Any, owner: Any) -> Any:
    """What a method or a filter has made, charged unless it is its `owner`; elements of an iterator as they come."""
    if made is owner or made is None or made is True or made is False:
        return made
    if isinstance(made, str | list | dict):
        size = len(made)
        check_size(size)
        charge(size if isinstance(made, str) else size * ELEMENT)
    elif isinstance(made, int):
        check_size(made.bit_length(), MOST_BITS)
    elif isinstance(made, bytes):
        raise SecurityError("it makes bytes")
    elif isinstance(made, Iterator):
        return _counted(made)
    return made


def _counted(made: Iterator[Any]) -> Iterator[Any]:
    for each in made:
        charge(ELEMENT + (8 * len(each) if isinstance(each, SIZED) else 0))
        yield each


def charge_printed(value: Any) -> Any:
    """The value, to be printed. Raises OverflowError where its text would be too long."""
    if type(value) is str:
        charge(len(value))
    else:
        elements, characters = _check_printable(value)
        charge(elements * ELEMENT + characters)
    return value


def _check_printable(value: Any) -> tuple[int, int]:
    elements, characters = weigh(value)
    check_size(characters)
    return elements, characters


def check_numbers(args: Sequence[Any], options: Mapping[str, Any]) -> None:
    for each in (*args, *options.values()):
        if isinstance(each, int):
            check_size(each)


def check_format(pattern: str, values: Any) -> None:
    """Limit what a format makes: the widths in its text or among `values`, and values of a mapping, printed again."""
    check_size(sum(int(digits[:8]) for digits in _DIGITS.findall(pattern)) if len(pattern) > 3 else 0)
    if isinstance(values, tuple) and "*" in pattern:
        check_size(sum(abs(each) for each in values if isinstance(each, int)))
    elif isinstance(values, dict):
        check_size(pattern.count("%") * sum(weigh(values)))


def check_made(name: str, value: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise OverflowError for a method of a text, or a filter, that would make something too large of `value`."""
    if name in _PRINTING and (type(value) is not str or args):
        _check_printable([value, args])
    given = [*args, *options.values()]
    texts = [each for each in given if isinstance(each, str)]
    numbers = [each for each in given if isinstance(each, int) and not isinstance(each, bool)]
    if name == "replace" and isinstance(value, str) and len(texts) > 1:
        check_size(len(value) + (value.count(texts[0]) if texts[0] else len(value) + 1) * len(texts[1]))
    elif name == "join":
        parts, between = (given[0], value) if isinstance(value, str) and given else (value, texts[0] if texts else "")
        if isinstance(parts, SIZED):
            check_size(sum(len(str(each)) + len(str(between)) for each in parts))
    elif name == "sum":
        sizes = [len(each) for each in value if isinstance(each, SIZED)]
        check_size(sum(sizes))
        charge(len(sizes) * sum(sizes))
    elif name == "format":
        check_format(str(value), options or tuple(args))
    elif name in ("indent", "wordwrap", "tojson", "pprint", "expandtabs"):
        widths = max([*numbers, *map(len, texts)], default=4)
        if not isinstance(value, str):
            check_size(widths * 16 * (1 + weigh(value)[0]))  # 16 deep, say
        elif widths > 64:
            check_size(widths * (1 + len(value)))
    else:
        for number in numbers:
            check_size(number, 1024 if name == "round" else _LARGEST)


def product_size(left: object, right: object) -> int:
    """Elements of a repetition."""
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, SIZED) and isinstance(times, int):
            return len(repeated) * times
    return 0
