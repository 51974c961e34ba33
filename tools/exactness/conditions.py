"""What may happen around a request of our engine, as data: conditions, and the processes that they run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # type: ignore[import-not-found]

from outrider.plans.host_drafters import HostDrafter
from outrider.plans.machine import available_cores
from outrider.plans.manifest import Manifest, rejects
from outrider.runtime.branch_request import MODES, Mode

NONE, MIXED = "none", "mixed"
"""Drafters of a condition, beside a drafter's name: plain decoding, and every request another one of the plan."""

INSTRUCTION_SETS = ("plain", "avx2", "avxvnni", "avx512", "amx", "neon", "i8mm")
"""Values of `OUTRIDER_ISA`; a processor has some of them (`plugins/csrc/onnxruntime/isa.cc`)."""

Cache = Literal["off", "cold", "warm", "shared", "crowded", "loaded"]
"""The prefix cache: none; emptied before each request; holding the request itself; holding another prompt with the same
beginning; too small for the requests, so that it evicts; read from a file that another process saved."""


@dataclass(frozen=True)
class Condition:
    """A row of the table. `way` is how the requests are made (`ways.WAYS`).

    `options` are added to those of every request. `mode` and `prefill_tokens` are the scheduler's. `order` is the seed
    of the order and the times of arrival, 0 for all at once in their order; at most `at_once` branches live together.
    `save` writes the prefix cache to the process's file afterwards. `again`: it repeats another condition with other
    drafters, modes or numbers.
    """

    group: str
    name: str
    way: str
    drafter: str = NONE
    options: dict[str, Any] = field(default_factory=dict)
    mode: Mode | None = None
    prefill_tokens: int | None = None
    cache: Cache = "off"
    order: int = 0
    at_once: int | None = None
    save: bool = False
    again: bool = False


@dataclass(frozen=True)
class Process:
    """Conditions that run in a process of their own, on `threads` and with `isa` (None: the best that there is).

    NumPy's own kernels do `without` these features of the processor.
    """

    conditions: tuple[Condition, ...]
    threads: int = 1
    isa: str | None = None
    without: tuple[str, ...] = ()


REFERENCE = Process((Condition("reference", "plain decoding, alone, cold, 1 thread", "alone"),))


@dataclass(frozen=True)
class LeftOut:
    """What the plan or the machine does not have, and why."""

    what: str
    reason: str


def usable_drafters(manifest: Manifest) -> tuple[list[str], list[LeftOut]]:
    """Return the drafters that must not change a token, and those whose acceptance by rejection may."""
    kept, left_out = list[str](), list[LeftOut]()
    by_name = {drafter.name: drafter for drafter in manifest.drafters}
    for drafter in manifest.drafters:
        other = by_name.get(drafter.otherwise or "") if isinstance(drafter, HostDrafter) else None
        if rejects([drafter if other is None else other]):
            reason = "accepted by rejection, which keeps the distribution of tokens, not the tokens"
            left_out.append(LeftOut(f"drafter {drafter.name}", reason))
        else:
            kept.append(drafter.name)
    return kept, left_out


def processes(
    manifest: Manifest, drafters: Sequence[str], *, on_processor: bool = True, quick: bool = False
) -> list[Process]:
    """Return the conditions that a plan can be put into, by the process that they run in.

    `quick` leaves out those that are there `again`.
    """
    some = MIXED if drafters else NONE
    first = (
        *_drafting(drafters),
        *_sequences(manifest, some),
        *_company(manifest, some),
        *_prefix_cache(some),
        *_interrupted(some),
        *_long_contexts(manifest, some),
    )
    loaded = partial(Condition, "prefix cache", drafter=some, cache="loaded")
    restarted = (
        Condition("restart", "a new process, alone, none", "alone"),
        Condition("restart", f"a new process, company, {some}", "company", some),
        loaded(f"saved, loaded after a restart, {some}", way="alone"),
        loaded(f"saved, loaded after a restart, company, {some}", way="company", again=True),
    )
    found = [Process(first), Process(restarted)]
    if on_processor:
        found += [Process(_on(f"{count} threads", "threads", some), threads=count) for count in _threads()]
        for place, isa in enumerate(INSTRUCTION_SETS):
            conditions = _on(isa, "instructions", some)
            found.append(Process(tuple(replace(each, again=each.again or place > 0) for each in conditions), isa=isa))
        if features := _numpy_features():
            found.append(Process(_on("NumPy's least", "instructions", some), without=features))
    if quick:
        found = [replace(each, conditions=tuple(own for own in each.conditions if not own.again)) for each in found]
    return [each for each in found if each.conditions]


def _numpy_features() -> tuple[str, ...]:
    """Features of this processor for which NumPy has kernels beyond those that it always runs."""
    return tuple(name for name in __cpu_dispatch__ if __cpu_features__.get(name))


def _threads() -> list[int]:
    return sorted({2, max(2, available_cores())})


def _drafting(drafters: Sequence[str]) -> list[Condition]:
    found = [Condition("drafters", "none, once again", "alone")]
    found += [Condition("drafters", name, "alone", name) for name in drafters]
    if not drafters:
        return found
    found.append(
        Condition("drafters", "by turns, disabled while they do not pay", "alone", MIXED, {"auto_disable": True})
    )
    few, some = {"draft_tokens": 1}, {"draft_tokens": 3, "draft_depth": 2}
    for name in drafters:
        for options in (few, some):
            said = ", ".join(f"{key} {value}" for key, value in options.items())
            again = name != drafters[0] or options is some
            found.append(Condition("draft options", f"{name}: {said}", "alone", name, options, again=again))
    return found


def _sequences(manifest: Manifest, some: str) -> list[Condition]:
    found = [Condition("sessions", f"turns and cuts, {some}", "session", some)]
    if some != NONE:
        found.append(Condition("sessions", "turns and cuts, none", "session", again=True))
    for mode in _modes(manifest):
        found += [
            Condition("branches", f"{mode}, {some}", "branches", some, mode=mode),
            Condition("branches", f"{mode}, none", "branches", mode=mode, again=True),
            Condition("branches", f"{mode}, 3 at once", "branches", some, mode=mode, at_once=3, again=True),
        ]
    return found


def _company(manifest: Manifest, some: str) -> list[Condition]:
    if manifest.target.branches == 1:
        return [Condition("company", f"submitted together, served in turn, {some}", "company", some)]
    found = list[Condition]()
    for mode in _modes(manifest):
        found.append(Condition("company", f"{mode}, all at once, {some}", "company", some, mode=mode))
        again = partial(Condition, "company", way="company", mode=mode, again=True)
        found += [
            again(f"{mode}, all at once, none"),
            again(f"{mode}, arriving by and by", drafter=some, order=1),
            again(f"{mode}, other order and times", drafter=some, order=2),
            again(f"{mode}, prompts 7 tokens a pass", drafter=some, prefill_tokens=7, order=3),
        ]
    return found


def _prefix_cache(some: str) -> list[Condition]:
    of_cache = partial(Condition, "prefix cache", drafter=some)
    return [
        of_cache(f"cold, {some}", way="alone", cache="cold"),
        of_cache(f"holds a prompt that begins alike, {some}", way="alone", cache="shared"),
        of_cache(f"holds the request itself, {some}", way="alone", cache="warm", save=True),
        of_cache(f"holds the prompts, company, {some}", way="company", cache="warm", again=True),
        of_cache(f"too small and evicting, company, {some}", way="company", cache="crowded", order=4, again=True),
    ]


def _interrupted(some: str) -> list[Condition]:
    cancelled = partial(Condition, "interrupted", way="cancelled", drafter=some, again=True)
    return [
        Condition("interrupted", f"a stream left, continued, {some}", "interrupted", some),
        cancelled(f"cancelled and continued in company, {some}", order=5),
        cancelled(f"the same, prompts in a cache, {some}", cache="warm", order=6),
    ]


def _long_contexts(manifest: Manifest, some: str) -> list[Condition]:
    if manifest.partial_kv is None:
        return []
    return [Condition("partial KV", f"lossless, {some}", "alone", some, {"partial_kv": "lossless"})]


def _on(what: str, group: str, some: str) -> tuple[Condition, ...]:
    """Conditions that are enough for another number of threads, or other instructions."""
    return (
        Condition(group, f"{what}, none", "alone"),
        Condition(group, f"{what}, {some}", "alone", some),
        Condition(group, f"{what}, company, {some}", "company", some, again=True),
        Condition(group, f"{what}, warm prefix cache, {some}", "alone", some, cache="warm", again=True),
    )


def _modes(manifest: Manifest) -> list[Mode]:
    target = manifest.target
    return [mode for mode in MODES if target.branches > 1 and (mode != "batching" or target.rows > 1)]
