"""Outlines: an answer that is planned as numbered points, each to be written as a branch, or given directly.

    [PLAN]
    1.<120><None>[-]read the file
    2.<80><search>[1]look up what it names
    [END]

A point has its number, the tokens that it is thought to take, the tool that it wants or None, the points that it waits
for or -, and its title. A direct answer stands between `[DIRECT]` and `[END]`. Source: FEATURES rows 10 and 11.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plans.errors import OutriderError
from runtime.text.grammar import Grammar, Piece, choice, literal, one_of, repeat, sequence

PLAN, DIRECT, END = "[PLAN]", "[DIRECT]", "[END]"
MOST_POINTS = 16
_LINE = re.compile(r"(\d{1,3})\.<(\d{1,6})><([^<>\n]*)>\[(-|\d{1,3}(?:,\d{1,3})*)\](.*\S)\s*")
_PRINTED = range(0x20, 0x7F)


class OutlineError(OutriderError):
    """A text that is no outline: what is wrong with it."""


@dataclass(frozen=True)
class Point:
    """A line of a plan. `line` is it as it stood, without the end of the line."""

    number: int
    tokens: int
    tool: str | None
    waits_for: tuple[int, ...]
    title: str
    line: str


@dataclass(frozen=True)
class Outline:
    """A plan's points in order, or a direct answer. `text` is the plan as it stood, its markers included."""

    text: str
    points: tuple[Point, ...] = ()
    direct: str | None = None


def parse_outline(text: str) -> Outline:
    """The outline that `text` holds; a text without a marker is a direct answer.

    Lines that are no points are passed over. Raises `OutlineError` for a plan without a point, or with two of one
    number, or with one that waits for none before it.
    """
    before, marker, rest = text.partition(PLAN)
    if not marker or DIRECT in before:
        _, marker, direct = text.partition(DIRECT)
        return Outline(text, direct=(direct if marker else text).partition(END)[0].strip())
    body, ended, _ = rest.partition(END)
    points: dict[int, Point] = {}
    for line in body.split("\n"):
        match = _LINE.fullmatch(line.strip())
        if match is None:
            continue
        number, tokens, tool, waits, title = match.groups()
        waits_for = () if waits == "-" else tuple(int(part) for part in waits.split(","))
        point = Point(int(number), int(tokens), None if tool == "None" else tool, waits_for, title, line.strip())
        if point.number in points:
            raise OutlineError(f"The plan has two points {number}: {points[point.number].line!r} and {point.line!r}.")
        if missing := [other for other in waits_for if other not in points]:
            raise OutlineError(f"Point {number} of the plan waits for {missing[0]}, which is no point before it.")
        points[point.number] = point
    if not points:
        raise OutlineError(f"The plan has no line such as '1.<120><None>[-]a title'; it is {body.strip()[:200]!r}.")
    return Outline(f"{PLAN}{body}{ended}", tuple(points.values()))


def outline_grammar(tools: Sequence[str] = (), most: int = MOST_POINTS, *, direct: bool = True) -> Grammar:
    """The form of an outline of at most `most` points, numbered from 1, with these tools; or of a `direct` answer."""
    digits = one_of(b"0123456789")
    character = choice(one_of(_PRINTED), *_beyond_ascii(_SEQUENCES))
    opening = choice(one_of(byte for byte in _PRINTED if chr(byte) not in " ["), *_beyond_ascii(_PRINTED_SEQUENCES))
    title = sequence(opening, repeat(character))
    tool = choice(*(literal(name) for name in ("None", *tools)))
    points: Piece | None = None
    for number in range(most, 0, -1):
        waits = literal("-")
        if number > 1:
            before = choice(*(literal(str(other)) for other in range(1, number)))
            waits = choice(waits, sequence(before, repeat(sequence(literal(","), before), 0, 2)))
        line = sequence(
            literal(f"{number}.<"), one_of(b"123456789"), repeat(digits, 0, 4), literal("><"), tool, literal(">["),
            waits, literal("]"), title, literal("\n"),
        )  # fmt: skip
        points = sequence(line) if points is None else sequence(line, repeat(points, 0, 1))
    assert points is not None
    plan = sequence(literal(f"{PLAN}\n"), points, literal(END))
    if not direct:
        return Grammar(plan)
    return Grammar(choice(plan, sequence(literal(f"{DIRECT}\n"), repeat(choice(one_of(b"\t\n"), character)))))


# Lead bytes, the bytes that may come second, and how many more follow: Unicode table 3-7.
_SEQUENCES = (
    (0xC2, 0xDF, (0x80, 0xBF), 0),
    (0xE0, 0xE0, (0xA0, 0xBF), 1),
    (0xE1, 0xEC, (0x80, 0xBF), 1),
    (0xED, 0xED, (0x80, 0x9F), 1),
    (0xEE, 0xEF, (0x80, 0xBF), 1),
    (0xF0, 0xF0, (0x90, 0xBF), 2),
    (0xF1, 0xF3, (0x80, 0xBF), 2),
    (0xF4, 0xF4, (0x80, 0x8F), 2),
)
# The same without those that white space is among.
_PRINTED_SEQUENCES = (
    (0xC2, 0xC2, (0xA1, 0xBF), 0),
    (0xC3, 0xDF, (0x80, 0xBF), 0),
    (0xE0, 0xE0, (0xA0, 0xBF), 1),
    (0xE1, 0xE1, (0x80, 0x99), 1),
    (0xE1, 0xE1, (0x9B, 0xBF), 1),
    (0xE2, 0xE3, (0x82, 0xBF), 1),
    (0xE4, 0xEC, (0x80, 0xBF), 1),
    *_SEQUENCES[3:],
)


def _beyond_ascii(sequences: Sequence[tuple[int, int, tuple[int, int], int]]) -> list[Piece]:
    """Characters of UTF-8, as well-formed byte sequences."""
    rest = one_of(range(0x80, 0xC0))
    return [
        sequence(one_of(range(low, high + 1)), one_of(range(second[0], second[1] + 1)), *[rest] * more)
        for low, high, second, more in sequences
    ]
