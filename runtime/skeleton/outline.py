"""Outlines: an answer that is planned as numbered points, each to be written as a branch, or given directly.

    [PLAN]
    1.<120><None>[-]read the file
    2.<80><search>[1]look up what it names
    [END]

A point has its number, the tokens that it is thought to take, the tool that it wants or None, the points that it waits
for or -, and its title. A direct answer stands between `[DIRECT]` and `[END]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.plans.errors import OutriderError
from outrider.runtime.text.structured_outputs import lark_text

PLAN, DIRECT, END = "[PLAN]", "[DIRECT]", "[END]"
MOST_POINTS = 16
_LINE = re.compile(r"(\d{1,3})\.<(\d{1,6})><([^<>\n]*)>\[(-|\d{1,3}(?:,\d{1,3})*)\](.*\S)\s*")


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


def outline_grammar(tools: Sequence[str] = (), most: int = MOST_POINTS, *, direct: bool = True) -> str:
    """The grammar, for Lark, of an outline of at most `most` points, numbered from 1, with these tools.

    With `direct`, it may be a direct answer instead.
    """
    rules = [
        f"start: plan | {lark_text(DIRECT + chr(10))} ANSWER" if direct else "start: plan",
        f"plan: {lark_text(PLAN + chr(10))} points_1 {lark_text(END)}",
        r"TOKENS: /[1-9][0-9]{0,4}/",
        r"TITLE: /[^\s\[\x00-\x1F\x7F][^\x00-\x1F\x7F]*\n/",
        r"ANSWER: /[^\x00-\x08\x0B-\x1F\x7F]*/",
        f"TOOL: {' | '.join(lark_text(f'><{name}>[') for name in ('None', *tools))}",
    ]
    for number in range(1, most + 1):
        rest = f" points_{number + 1}?" if number < most else ""
        waits = '"-"'
        if number > 1:
            before = "|".join(str(other) for other in range(1, number))
            waits = f"/-|({before})(,({before})){{0,2}}/"
        rules.append(f'points_{number}: "{number}.<" TOKENS TOOL {waits} "]" TITLE{rest}')
    return "\n".join(rules) + "\n"
