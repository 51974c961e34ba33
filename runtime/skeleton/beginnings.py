"""How the branches of points begin: after the points that they wait for, and after what their tools have found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from threading import Thread

from outrider.plans.errors import RequestError
from outrider.plans.text_check import check_text
from outrider.runtime.branch_request import LatePrompt
from outrider.runtime.generation import Generation
from outrider.runtime.skeleton.outline import Outline, Point

Tool = Callable[[str], str]
"""A function that a point may want: of the point's title, it returns what the point's branch is to see."""


def check_tools(tools: Mapping[str, Tool]) -> None:
    """Raise RequestError for a name that an outline cannot hold, or what is no function."""
    for name, tool in tools.items():
        if not isinstance(name, str) or not name or name == "None" or not name.isprintable() or set(name) & set("<>"):
            raise RequestError(f"tools has the name {name!r}; pass a text without < and >, and not None.")
        if not callable(tool):
            raise RequestError(f"tools[{name!r}] is of type {type(tool).__name__}; pass a function of a point's title.")


class Beginnings:
    """The beginnings of an outline's branches. Tools run in threads from the start, all at once.

    Nobody waits for a tool that still runs when the answer ends, nor does the process.
    """

    def __init__(
        self, outline: Outline, template: str, tools: Mapping[str, Tool], encode: Callable[[str], list[int]]
    ) -> None:
        """`template` is that of `plans.skeleton.Skeleton.branch`; `encode` gives a branch's tokens for its text."""
        self._outline, self._template, self._encode = outline, template, encode
        self._places = {point.number: place for place, point in enumerate(outline.points)}
        self._found = {
            place: _start(tools[point.tool], point)
            for place, point in enumerate(outline.points)
            if point.tool is not None and point.tool in tools
        }

    def prompt(self, place: int) -> list[int] | LatePrompt:
        """The beginning of a point's branch; a function of other branches where it depends on them, or on a tool."""
        if place not in self._found and not self._outline.points[place].waits_for:
            return self._encode(self._text(place, {}))

        def late(ended: Mapping[int, Generation], seconds: float) -> list[int] | None:
            waits = any(self._places[number] not in ended for number in self._outline.points[place].waits_for)
            found = self._found.get(place)
            if found is not None and wait([found], 0.0 if waits else seconds).done:
                self.found(place)  # raises what the tool has raised, however long the point is to wait
            elif found is not None:
                return None
            if waits:
                return None
            return self._encode(self._text(place, ended))

        return late

    def found(self, place: int) -> str | None:
        """What a point's tool has found; None without one, or while it runs. Raises what its function raises."""
        if place not in self._found or not self._found[place].done():
            return None
        result = self._found[place].result()
        check_text(result, f"What the tool {self._outline.points[place].tool} returned")
        return result

    def _text(self, place: int, ended: Mapping[int, Generation]) -> str:
        """The text that a branch begins with: in place of `{point}`, what the point sees, and its line."""
        point, seen = self._outline.points[place], ""
        for number in dict.fromkeys(point.waits_for):
            other = self._places[number]
            seen += f"{self._outline.points[other].line}\n{ended[other].text.strip()}\n"
        if (found := self.found(place)) is not None:
            seen += f"<{point.tool}>\n{found.strip()}\n"
        elif point.tool is not None:
            seen += f"<{point.tool}> is not available.\n"
        return self._template.format(outline=self._outline.text, point=seen + point.line)


def _start(tool: Tool, point: Point) -> Future[str]:
    """Call a point's tool in a thread of its own."""
    found: Future[str] = Future()

    def call() -> None:
        try:
            found.set_result(tool(point.title))
        except BaseException as error:  # SystemExit too: the caller of `answer` has not asked to end
            error.add_note(f"raised by the tool {point.tool} of point {point.number}, {point.title!r}")
            ended = not isinstance(error, Exception)
            found.set_exception(RequestError(f"The tool {point.tool} ended its thread: {error!r}") if ended else error)

    Thread(target=call, name=f"outrider-tool-{point.tool}", daemon=True).start()
    return found
