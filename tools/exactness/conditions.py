"""What may happen around a request of our engine, as data: conditions, and the processes that they run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    `save` writes the prefix cache to the process's file afterwards.
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

    `quick` leaves out conditions that repeat one with other drafters, modes or numbers.
    """
    some = MIXED if drafters else NONE
    first = (
        *_drafting(manifest, drafters, quick),
        *_sequences(manifest, some, quick),
        *_company(manifest, some, quick),
        *_prefix_cache(some, quick),
        *_interrupted(some, quick),
        *_long_contexts(manifest, some),
    )
    restarted: tuple[Condition, ...] = (
        Condition("restart", "a new process, alone, none", "alone"),
        Condition("restart", f"a new process, company, {some}", "company", some),
        Condition("prefix cache", f"saved, loaded after a restart, {some}", "alone", some, cache="loaded"),
    )
    if not quick:
        name = f"saved, loaded after a restart, company, {some}"
        restarted += (Condition("prefix cache", name, "company", some, cache="loaded"),)
    found = [Process(first), Process(restarted)]
    if on_processor:
        found += [Process(_on(f"{count} threads", "threads", some, quick), threads=count) for count in _threads()]
        sets = ("plain",) if quick else INSTRUCTION_SETS
        found += [Process(_on(isa, "instructions", some, quick), isa=isa) for isa in sets]
        if features := _numpy_features():
            found.append(Process(_on("NumPy's least", "instructions", some, quick), without=features))
    return found


def _numpy_features() -> tuple[str, ...]:
    """Features of this processor for which NumPy has kernels beyond those that it always runs."""
    return tuple(name for name in __cpu_dispatch__ if __cpu_features__.get(name))


def _threads() -> list[int]:
    return sorted({2, max(2, available_cores())})


def _drafting(manifest: Manifest, drafters: Sequence[str], quick: bool) -> list[Condition]:
    found = [Condition("drafters", "none, once again", "alone")]
    found += [Condition("drafters", name, "alone", name) for name in drafters]
    if not drafters:
        return found
    found.append(
        Condition("drafters", "by turns, disabled while they do not pay", "alone", MIXED, {"auto_disable": True})
    )
    for name in drafters[:1] if quick else drafters:
        limits: list[dict[str, Any]] = [{"draft_tokens": 1}]
        if not quick:
            limits.append({"draft_tokens": 3, "draft_depth": 2})
        for options in limits:
            said = ", ".join(f"{key} {value}" for key, value in options.items())
            found.append(Condition("draft options", f"{name}: {said}", "alone", name, options))
    return found


def _sequences(manifest: Manifest, some: str, quick: bool) -> list[Condition]:
    found = [Condition("sessions", f"turns and cuts, {some}", "session", some)]
    if not quick and some != NONE:
        found.append(Condition("sessions", "turns and cuts, none", "session"))
    for mode in _modes(manifest):
        found.append(Condition("branches", f"{mode}, {some}", "branches", some, mode=mode))
        if not quick:
            found.append(Condition("branches", f"{mode}, none", "branches", mode=mode))
            found.append(Condition("branches", f"{mode}, 3 at once", "branches", some, mode=mode, at_once=3))
    return found


def _company(manifest: Manifest, some: str, quick: bool) -> list[Condition]:
    if manifest.target.branches == 1:
        return [Condition("company", f"submitted together, served in turn, {some}", "company", some)]
    found = list[Condition]()
    for mode in _modes(manifest):
        found.append(Condition("company", f"{mode}, all at once, {some}", "company", some, mode=mode))
        if quick:
            continue
        found += [
            Condition("company", f"{mode}, all at once, none", "company", mode=mode),
            Condition("company", f"{mode}, arriving by and by", "company", some, mode=mode, order=1),
            Condition("company", f"{mode}, other order and times", "company", some, mode=mode, order=2),
            Condition(
                "company", f"{mode}, prompts 7 tokens a pass", "company", some, mode=mode, prefill_tokens=7, order=3
            ),
        ]
    return found


def _prefix_cache(some: str, quick: bool) -> list[Condition]:
    found = [
        Condition("prefix cache", f"cold, {some}", "alone", some, cache="cold"),
        Condition("prefix cache", f"holds a prompt that begins alike, {some}", "alone", some, cache="shared"),
        Condition("prefix cache", f"holds the request itself, {some}", "alone", some, cache="warm", save=True),
    ]
    if not quick:
        found += [
            Condition("prefix cache", f"holds the prompts, company, {some}", "company", some, cache="warm"),
            Condition(
                "prefix cache", f"too small and evicting, company, {some}", "company", some, cache="crowded", order=4
            ),
        ]
    return found


def _interrupted(some: str, quick: bool) -> list[Condition]:
    found = [Condition("interrupted", f"a stream left, continued, {some}", "interrupted", some)]
    if not quick:
        found += [
            Condition("interrupted", f"cancelled and continued in company, {some}", "cancelled", some, order=5),
            Condition("interrupted", f"the same, prompts in a cache, {some}", "cancelled", some, cache="warm", order=6),
        ]
    return found


def _long_contexts(manifest: Manifest, some: str) -> list[Condition]:
    if manifest.partial_kv is None:
        return []
    return [Condition("partial KV", f"lossless, {some}", "alone", some, {"partial_kv": "lossless"})]


def _on(what: str, group: str, some: str, quick: bool) -> tuple[Condition, ...]:
    """Conditions that are enough for another number of threads, or other instructions."""
    found = [Condition(group, f"{what}, none", "alone"), Condition(group, f"{what}, {some}", "alone", some)]
    if not quick:
        found.append(Condition(group, f"{what}, company, {some}", "company", some))
        found.append(Condition(group, f"{what}, warm prefix cache, {some}", "alone", some, cache="warm"))
    return tuple(found)


def _modes(manifest: Manifest) -> list[Mode]:
    target = manifest.target
    return [mode for mode in MODES if target.branches > 1 and (mode != "batching" or target.rows > 1)]
