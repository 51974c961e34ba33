"""Skeleton-of-thought: an answer is outlined first, and its points are then written as branches, all at once.

Decoding of the outline is constrained by a grammar (`outline.py`). Its KV is then cut back to what stands before it,
the system's words and the question, and every branch continues from there: the outline again, its point, what it says.
A point that waits for others begins once these have been written, and sees their text; a point with a tool begins once
that has been called (`beginnings.py`).
Source: arXiv 2307.15337.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Unpack, cast

from outrider.plans.errors import RequestError
from outrider.plans.skeleton import Skeleton as Settings
from outrider.runtime.branch_request import Mode
from outrider.runtime.generation import FinishReason, Generation
from outrider.runtime.options.options import MAX_STOPS, Options, check_options
from outrider.runtime.runtime import Runtime
from outrider.runtime.skeleton.beginnings import Beginnings, Tool, check_tools
from outrider.runtime.skeleton.outline import END, PLAN, Outline, OutlineError, Point, outline_grammar, parse_outline
from outrider.runtime.stats import Stats
from outrider.runtime.text.prompt import chat_prompt


@dataclass(frozen=True)
class SkeletonSpan:
    """A piece of text, as it is certain: of the outline where `point` is None, else of the point at that place.

    With the outline's last piece comes what it says.
    """

    point: int | None
    text: str
    ended: bool = False
    outline: Outline | None = None


@dataclass
class Answer:
    """The outline, what each of its points came to, and the cost of both. `text` is all of it in the plan's order.

    `found` is what the points' tools have returned, None for a point without one.
    """

    outline: Outline
    planned: Generation
    points: list[Generation] = field(default_factory=list)
    found: list[str | None] = field(default_factory=list)
    outline_stats: Stats = field(default_factory=Stats)
    stats: Stats = field(default_factory=Stats)

    @property
    def text(self) -> str:
        if self.outline.direct is not None:
            return self.outline.direct
        return "\n\n".join(generation.text.strip() for generation in self.points)


class Skeleton:
    """Answers questions with one plan."""

    def __init__(
        self, runtime: Runtime, settings: Settings | None = None, *, tools: Mapping[str, Tool] | None = None
    ) -> None:
        """`settings` in place of the plan's; `tools` are functions that points may want, beside the tools in settings.

        A function gets a point's title, in a thread, and returns what the point's branch sees. What it raises ends the
        answer. The branch of a point whose tool has no function says so. Raises RequestError for a tool that cannot
        be named in an outline.
        """
        self._runtime, self._settings = runtime, runtime.skeleton if settings is None else settings
        own = self._settings
        self._tools = dict(tools or {})
        check_tools(self._tools)
        names = tuple(dict.fromkeys([*own.tools, *self._tools]))
        self._grammar = outline_grammar(names, own.most_points, direct=own.direct)

    def answer(
        self,
        question: str,
        *,
        system: str | None = None,
        max_parallel: int | None = None,
        mode: Mode = "in-one-sequence",
        **options: Unpack[Options],
    ) -> Answer:
        """The whole answer; see `stream`."""
        stream = self.stream(question, system=system, max_parallel=max_parallel, mode=mode, **options)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def stream(
        self,
        question: str,
        *,
        system: str | None = None,
        max_parallel: int | None = None,
        mode: Mode = "in-one-sequence",
        **options: Unpack[Options],
    ) -> Generator[SkeletonSpan, None, Answer]:
        """Outline and points as they are written; the generator returns the answer.

        `max_new_tokens` is that of a point. Raises RequestError, and OutlineError for an outline without sense.
        """
        runtime = self._runtime
        stop = check_options({"stop": options.get("stop")})["stop"]
        if len(stop) == MAX_STOPS:  # after them comes the points' own
            raise RequestError(f"stop holds {len(stop)} texts; a skeleton takes at most {MAX_STOPS - 1}.")
        system = self._settings.system if system is None else system
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        prefix = chat_prompt(messages, runtime.tokenizer, runtime.manifest.target)
        own = {
            "max_new_tokens": self._settings.outline_tokens,
            "structured_outputs": {"grammar": self._grammar},
            "ignore_eos": False,
            "stop": [END],
        }
        branch = {"prompt": prefix[-1:], **own}
        first = next((drafter.name for drafter in runtime.manifest.drafters), "none")
        keep_for = [options.get("drafter") or first]
        planning = runtime.stream_branches(
            prefix[:-1], [branch], mode=mode, max_parallel=max_parallel, keep_for=keep_for, **options
        )
        for each in planning:
            outline = None if each.result is None else _outline_of(each.result)
            yield SkeletonSpan(None, each.text, outline is not None, outline)
        (planned,) = planning.results
        answer = Answer(_outline_of(planned), planned, outline_stats=planning.stats)
        points = answer.outline.points
        if not points:
            return answer
        ended = cast(Options, {**options, "stop": [*stop, END]})

        def encode(text: str) -> list[int]:
            return prefix[-1:] + runtime.tokenizer.encode(text, add_special_tokens=False)

        beginnings = Beginnings(answer.outline, self._settings.branch, self._tools, encode)
        branches = [
            {"prompt": beginnings.prompt(place), "predicted_tokens": max(1, point.tokens)}
            for place, point in enumerate(points)
        ]
        writing = runtime.stream_branches(prefix[:-1], branches, mode=mode, max_parallel=max_parallel, **ended)
        for each in writing:
            yield SkeletonSpan(each.sequence, each.text, each.result is not None)
        answer.points, answer.stats = writing.results, writing.stats
        answer.found = [beginnings.found(place) for place in range(len(points))]
        return answer


def _outline_of(planned: Generation) -> Outline:
    """The outline as far as it goes: without a line that was cut off, if there is another."""
    if planned.finish_reason is FinishReason.CANCELLED:
        return Outline(planned.text)
    if planned.finish_reason is FinishReason.STOP:
        return parse_outline(planned.text + END)
    if planned.text.startswith(PLAN):
        with suppress(OutlineError):
            return parse_outline(planned.text.rpartition("\n")[0])
    return parse_outline(planned.text)


def titles(points: Sequence[Point]) -> Iterator[str]:
    """Names of the points for a screen."""
    for point in points:
        yield f"{point.number}. {point.title.strip()}"
