"""`python -m outrider.runtime skeleton`: an outlined answer whose points are written at once."""

from __future__ import annotations

import argparse
from contextlib import closing, nullcontext
from typing import Any

from outrider.commands.arguments import at_least_1
from outrider.commands.console import print_json, stderr, stdout
from outrider.runtime.branch_request import MODES
from outrider.runtime.cli.arguments import add_shared, generation_json, load, read_options
from outrider.runtime.cli.side_by_side import SideBySide
from outrider.runtime.skeleton.skeleton import Answer, Skeleton, SkeletonSpan, titles


def add_skeleton(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "skeleton",
        help="outline an answer, then write its points at once",
        description="Outline the answer to a question, in a form that decoding keeps to, then write all points of the "
        "outline as branches. On a terminal they are shown side by side as they grow. --max-new-tokens is that of a "
        "point. The plan must serve several branches, and its model know the form.",
        epilog='example: %(prog)s build/branches --question "Read and write WAVE files."',
    )
    add_shared(parser)
    parser.add_argument("--question", required=True, help="what is to be answered")
    parser.add_argument("--system", help="a system message (default: the recipe's)")
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help="as of branches")
    parallel = "points at once (default: all that the plan has room for)"
    parser.add_argument("--max-parallel", type=at_least_1, metavar="N", help=parallel)
    parser.add_argument("--json", action="store_true", help="print one JSON object: outline, points, text, stats")
    parser.set_defaults(command=_skeleton)


def _skeleton(arguments: argparse.Namespace) -> int:
    options = read_options(arguments)
    skeleton = Skeleton(load(arguments))
    own: dict[str, Any] = {"system": arguments.system, "mode": arguments.mode, "max_parallel": arguments.max_parallel}
    stream = skeleton.stream(arguments.question, **own, **options)
    shown = _Screen() if stdout.is_terminal and not arguments.json else None
    with nullcontext() if shown is None else closing(shown):
        while True:
            try:
                said = next(stream)
            except StopIteration as end:
                answer: Answer = end.value
                break
            if shown is not None:
                shown.take(said)
    if arguments.json:
        print_json(_json(answer))
        return 0
    if shown is None:
        print(answer.outline.text if answer.points else answer.text)
        for point, generation in zip(answer.outline.points, answer.points, strict=True):
            print(f"\n{point.line}\n{generation.text.strip()}")
    stderr.print(_summary(answer), style="dim")
    return 0


class _Screen:
    """The outline as it is written, and below it the points side by side."""

    def __init__(self) -> None:
        self._titles: list[str] = []
        self._points: SideBySide | None = None

    def take(self, said: SkeletonSpan) -> None:
        if said.point is None:
            self._titles = [] if said.outline is None else list(titles(said.outline.points))
            stdout.print(said.text, end="", markup=False, highlight=False)
            return
        if self._points is None:
            stdout.print()
            self._points = SideBySide(stdout, self._titles)
            self._points.__enter__()
        self._points.add(said.point, said.text)
        if said.ended:
            self._points.end(said.point, "done")

    def close(self) -> None:
        if self._points is not None:
            self._points.__exit__(None, None, None)
        else:
            stdout.print()


def _json(answer: Answer) -> dict[str, object]:
    points = zip(answer.outline.points, answer.points, strict=True)
    return {
        "outline": answer.outline.text,
        "direct": answer.outline.direct,
        "points": [
            {"number": p.number, "tokens": p.tokens, "tool": p.tool, "waits_for": list(p.waits_for), "title": p.title}
            | generation_json(generation)
            for p, generation in points
        ],
        "text": answer.text,
        "outline_stats": answer.outline_stats.to_json(),
        "stats": answer.stats.to_json(),
    }


def _summary(answer: Answer) -> str:
    outline, points = answer.outline_stats, answer.stats
    return (
        f"outline: {outline.new_tokens} tokens in {outline.total_ms:.0f} ms; points: {points.new_tokens} tokens of "
        f"{points.sequences} branches in {points.total_ms:.0f} ms, {points.tokens_per_second:.0f} tokens/s, "
        f"{points.reused_tokens} tokens of the prompt kept"
    )
