"""Prompt tokens that replicas compute for conversations, by how requests are routed to them."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console

from outrider.commands.console import progress_bar
from outrider.commands.packages import optional_packages
from outrider.plans.errors import RequestError
from outrider.plans.plan import Plan, open_plan
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.request_queue import SchedulerConfig
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.measuring import Column, make_table

_WAYS = ("prefix", "round-robin")


@dataclass(frozen=True)
class Talk:
    """Conversations: the messages of each as token ids, and how many tokens the answers have."""

    messages: list[list[list[int]]]
    new: int


def measure_routing(options: argparse.Namespace) -> dict[str, Any]:
    """A row for every way of routing, on replicas of their own."""
    with optional_packages("Routing", "ray"):
        from ray import serve

        from outrider.runtime.ray_cluster import cluster
        from outrider.runtime.ray_serve.settings import Settings
    plan = open_plan(options.plan)
    talk = _talk(plan, options)
    rows = []
    with progress_bar("measuring") as progress, cluster(None, options.replicas):
        serve.start("Disabled")
        for place, way in enumerate(_WAYS):
            progress(place, len(_WAYS), way)
            settings = Settings(
                plan=options.plan.resolve(), threads=options.threads or 1, replicas=options.replicas, routing=way
            )
            rows.append(measure_way(settings, plan, talk))
        serve.shutdown()
    named = ("conversations", "turns", "replicas", "first", "message", "new")
    return {
        "identity": plan.manifest.identity,
        **{name: getattr(options, name) for name in named},
        "rows": [{key: value for key, value in row.items() if key != "answers"} for row in rows],
        "ratio": rows[0]["computed"] / rows[1]["computed"],
        "same_answers": rows[0]["answers"] == rows[1]["answers"],
    }


def _talk(plan: Plan, options: argparse.Namespace) -> Talk:
    """Conversations that are cut out of the prompts, one text each."""
    tokenizer = Tokenizer.load(plan.root / "tokenizer", plan.manifest.text.special_tokens)
    first, message, turns = options.first, options.message, options.turns
    length = first + message * (turns - 1)
    if (whole := length + options.new * turns) > plan.manifest.target.context:
        raise RequestError(
            f"A conversation takes {whole} tokens, and the plan's context is {plan.manifest.target.context}; pass "
            "fewer --turns, or shorter messages or answers."
        )
    texts = [tokenizer.encode(prompt.text) for prompt in choose_prompts(options.plan, options.prompts)]
    cut = cut_prompts(texts, length, length)
    if len(cut) < options.conversations:
        raise RequestError(
            f"There are {len(cut)} prompts of {length} tokens; pass fewer --conversations, or --prompts FILE of more."
        )
    bounds = [0, *(first + message * turn for turn in range(turns))]
    return Talk([[ids[a:b] for a, b in pairwise(bounds)] for ids in cut[: options.conversations]], options.new)


def measure_way(settings: Any, plan: Plan, talk: Talk) -> dict[str, Any]:
    """Have the conversations on an application of `settings`; what its replicas computed, and what they answered."""
    from ray import serve

    from outrider.runtime.ray_serve.application import REPLICA, build

    name = f"routing-{settings.routing}"  # of its own: handles remember the router of a name
    serve.run(build(settings), name=name, route_prefix=None)
    try:
        replicas: Any = serve.get_deployment_handle(REPLICA, name)
        warmed = _counted(replicas)
        answers = asyncio.run(_converse(replicas, plan, talk))
        counts = _counted(replicas)
    finally:
        serve.delete(name)
    asked, reused = (
        sum(getattr(each, name) - getattr(warmed[replica], name) for replica, each in counts.items())
        for name in ("prompt_tokens", "reused_tokens")
    )
    finished = [each.finished - warmed[replica].finished for replica, each in counts.items()]
    return {
        "way": settings.routing,
        "requests": sum(finished),
        "busiest": max(finished),
        "prompt_tokens": asked,
        "computed": asked - reused,
        "answers": answers,
    }


def _counted(replicas: Any) -> dict[str, SchedulerStats]:
    """The counts of each replica since it was started."""
    return {each.replica: each.stats for each in replicas.broadcast("about").results(timeout_s=60)}


async def _converse(replicas: Any, plan: Plan, talk: Talk) -> list[list[int]]:
    """All conversations at once, turn by turn, in another order in every turn; the answers' tokens."""
    from outrider.runtime.ray_serve.remote_runtime import RemoteRuntime
    from outrider.runtime.ray_serve.streams import sender

    remote, draw = RemoteRuntime(plan, sender(replicas), SchedulerConfig()), random.Random(0)
    so_far: list[list[int]] = [[] for _ in talk.messages]
    answers: list[list[int]] = [[] for _ in talk.messages]
    for turn in range(len(talk.messages[0])):
        order = list(range(len(so_far)))
        draw.shuffle(order)
        for place in order:
            so_far[place] += talk.messages[place][turn]
        handles = {
            place: remote.submit_all([(so_far[place], {"max_new_tokens": talk.new, "ignore_eos": True})])[0]
            for place in order
        }
        for place, handle in handles.items():
            found = (await handle).token_ids
            so_far[place] += found
            answers[place] += found
    return answers


def print_routing(report: dict[str, Any], console: Console) -> None:
    named: Sequence[str] = ("conversations", "turns", "replicas")
    console.print(", ".join(f"{report[name]} {name}" for name in named) + f"; plan {report['identity'][:12]}")
    console.print(make_table(_COLUMNS, report["rows"]))
    same = "the same answers" if report["same_answers"] else "OTHER answers"
    console.print(f"by prefix, {report['ratio']:.3f} of what is computed in turn; {same}")


_COLUMNS = (
    Column("way", "way", text=True), Column("requests", "requests"), Column("of the busiest replica", "busiest"),
    Column("prompt tokens", "prompt_tokens"), Column("computed", "computed"),
)  # fmt: skip
