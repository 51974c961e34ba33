"""Any server of OpenAI's API under conditions that a client can bring about, compared with its own first answers."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from threading import Event
from typing import Any

from outrider.commands.console import progress_bar
from outrider.plans.errors import RequestError
from outrider.tools.exactness.conditions import LeftOut
from outrider.tools.exactness.measure import shown
from outrider.tools.exactness.requests import Asked, read_texts, server_requests
from outrider.tools.exactness.server import Server
from outrider.tools.identity import git_sha
from outrider.tools.parting import Outcome, compare

OURS = "outrider"
"""The owner of models that our own server names."""

_STEP_SECONDS = 0.05  # between arrivals, times 0 to 3


@dataclass(frozen=True)
class Side:
    """A server, and fields that every request to it has."""

    server: Server
    body: dict[str, Any]

    def alone(self, asked: Sequence[Asked], *, stream: bool = False) -> list[Outcome]:
        """One request after another."""
        return [self.server.ask(each, self.body, stream=stream) for each in asked]

    def company(self, asked: Sequence[Asked], at_once: int, order: int = 0) -> list[Outcome]:
        """`at_once` requests in flight. With an `order`, its seed: another order, and pauses between arrivals."""
        draw, pausing = random.Random(order), Event()
        places = draw.sample(range(len(asked)), len(asked)) if order else list(range(len(asked)))
        futures = {}
        with ThreadPoolExecutor(at_once) as pool:
            for place in places:
                futures[place] = pool.submit(self.server.ask, asked[place], self.body)
                if order:
                    pausing.wait(_STEP_SECONDS * draw.randrange(4))
        return [futures[place].result() for place in range(len(asked))]

    def answers_after(self, asked: Sequence[Asked], beginning: Callable[[Asked], Asked]) -> list[Outcome]:
        """Each after another request, which `beginning` makes of it."""
        found = []
        for each in asked:
            self.server.ask(beginning(each), self.body)
            found.append(self.server.ask(each, self.body))
        return found


@dataclass(frozen=True)
class Row:
    """A condition: requests that are made when it is its turn. `streams` tells no log-probabilities."""

    group: str
    name: str
    server: Server
    run: Callable[[], list[Outcome]]
    streams: bool = False


def measure_server(options: argparse.Namespace) -> dict[str, Any]:
    """Run every condition against `--against`. Raises `RequestError` where a server answers no request."""
    asked = server_requests(
        read_texts(options.plan, options.prompts), options.requests, options.new, options.characters
    )
    with ExitStack() as stack:
        first = Side(stack.enter_context(Server(options.against, options.start, options.model)), options.body or {})
        second = first.server
        if options.against_drafting is not None:
            second = Server(options.against_drafting, options.start_drafting, options.model)
            stack.enter_context(second)
        drafting = [Side(second, {**(options.body or {}), **body}) for body in options.drafting_body or ()]
        if options.against_drafting is not None and not drafting:
            drafting = [Side(second, options.body or {})]
        rows = list(_rows(first, drafting, asked, options.at_once, options.quick))
        report = _compared(first, rows, asked)
        left_out = _left_out(first, drafting)
    owners = {first.server.owner, second.owner}
    return {
        "git_sha": git_sha(),
        "about": f"{options.against}, model {first.server.model!r} of {first.server.owner or 'nobody named'}; "
        f"{len(asked)} requests of at most {options.new} tokens, compared with the first answers, alone",
        "ours": owners == {OURS},
        "requests": len(asked),
        "left_out": [asdict(each) for each in left_out],
        **report,
    }


def _compared(first: Side, rows: Sequence[Row], asked: Sequence[Asked]) -> dict[str, Any]:
    found = list[dict[str, Any]]()
    with progress_bar("comparing") as progress:
        progress(0, 1 + len(rows), "the first answers")
        expected = first.alone(asked)
        if all(outcome.error for outcome in expected):
            raise RequestError(f"{first.server.url} answers no request: {expected[0].error}")
        names = [each.name for each in asked]
        for row in rows:
            progress(1 + len(found), 1 + len(rows), f"{row.group}: {row.name}")
            row.server.costs.clear()
            outcomes = row.run()
            ours = row.server.owner == OURS and not row.streams
            told = all(outcome.logprobs for outcome in (*expected, *outcomes) if outcome.text)
            witness = _summed(row.server.costs) if ours else None
            figures = {"witness": witness, "without_logprobs": row.streams or not told}
            found.append(
                {"group": row.group, "condition": row.name, **shown(compare(names, expected, outcomes)), **figures}
            )
    return {
        "tokens": sum(len(outcome.tokens) for outcome in expected) or None,
        "failed_at_first": sum(bool(outcome.error) for outcome in expected),
        "rows": found,
        "diverged": sum(bool(row["diverged"] or row["logprobs_diverged"]) for row in found),
    }


def _summed(costs: Sequence[dict[str, int]]) -> dict[str, int]:
    """What the answers of a row tell that shows that it was what it says."""
    return {name: sum(each[name] for each in costs) for name in ("accepted", "reused")}


def _rows(first: Side, drafting: Sequence[Side], asked: Sequence[Asked], at_once: int, quick: bool) -> Iterator[Row]:
    yield Row("alone", "again, in the same order", first.server, lambda: first.alone(asked))
    if not quick:
        yield Row("alone", "again, in reverse order", first.server, lambda: first.alone(asked[::-1])[::-1])
        yield Row("alone", "streamed", first.server, lambda: first.alone(asked, stream=True), streams=True)
    yield Row(
        "warm prompt", "each twice in a row, the second", first.server, lambda: first.answers_after(asked, _itself)
    )
    yield Row(
        "warm prompt", "after one that begins alike", first.server, lambda: first.answers_after(asked, _beginning)
    )
    yield Row("company", f"{at_once} at once", first.server, lambda: first.company(asked, at_once))
    if not quick:
        yield Row(
            "company",
            f"{at_once} at once, other order and times",
            first.server,
            lambda: first.company(asked, at_once, order=1),
        )
    if first.server.restarts:
        yield Row("restart", "alone, in the same order", first.server, lambda: _restarted(first).alone(asked))
        if not quick:
            yield Row(
                "restart",
                f"{at_once} at once from the first on",
                first.server,
                lambda: _restarted(first).company(asked, at_once),
            )
    for side in drafting:
        yield from _drafting_rows(side, asked, at_once, quick)


def _drafting_rows(side: Side, asked: Sequence[Asked], at_once: int, quick: bool) -> Iterator[Row]:
    group = f"drafting {side.body['drafter']}" if "drafter" in side.body else "drafting"
    yield Row(group, "alone", side.server, lambda: side.alone(asked))
    if not quick:
        yield Row(group, "alone, again", side.server, lambda: side.alone(asked))
    yield Row(group, f"{at_once} at once", side.server, lambda: side.company(asked, at_once))


def _restarted(side: Side) -> Side:
    side.server.restart()
    return side


def _itself(asked: Asked) -> Asked:
    return asked


def _beginning(asked: Asked) -> Asked:
    """A request of which the first two thirds of the prompt are the same."""
    beginning = asked.prompt[: 2 * len(asked.prompt) // 3]
    return Asked(asked.name, f"{beginning} # otherwise", {**asked.options, "max_tokens": 1})


def _left_out(first: Side, drafting: Sequence[Side]) -> list[LeftOut]:
    found = []
    if not first.server.tells_logprobs:
        found.append(LeftOut("log-probabilities", "the server tells none; texts are compared"))
    if not first.server.restarts:
        found.append(LeftOut("rows of a restart", "they need --start COMMAND"))
    if not drafting:
        found.append(LeftOut("rows with drafts", "they need --against-drafting URL or --drafting-body JSON"))
    return found
