"""The cost of a long context with the full KV cache and with the partial one: verify times, tokens/s, agreement."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from outrider import PrefixCacheConfig, Runtime, Session, Stats
from outrider.commands.arguments import Parser, at_least_1, counts
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.partial_kv import PARTIAL_MODES
from outrider.plans.plan import read_manifest
from outrider.runtime.kv.memory import HostKv, KvMemory
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.options.options import Options
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.tools.bench.prompts import choose_prompts, cut_prompts, room_for_prompts
from outrider.tools.bench.sampling import GREEDY, read_sampling
from outrider.tools.identity import identity_columns
from outrider.tools.measuring import (
    Column,
    add_arguments,
    drafters_named,
    make_table,
    measuring,
    middle,
    print_head,
    run_in_turn,
    run_tool,
    within,
)
from outrider.tools.parting import same_share

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
OFF = "off"
_CHAIN = 8  # tokens after the tip of a verify pass that is timed
_REFRESHING = ("BlockSummary", "BlockSelect", "PartialKvGather")


class RandomRows(TokenKv):
    """Random keys and values in place of a prompt's own: tokens after them mean nothing, and cost what they would."""

    def __init__(self) -> None:
        self._numbers = np.random.default_rng(0)

    def get(self, start: int, count: int, to: KvMemory, at: int) -> None:
        """Fill `count` slots of `to` from `at` on."""
        there = to.array(at, count)
        numbers = self._numbers.standard_normal(there.shape, np.float32).astype(there.dtype)
        to.copy(at, HostKv(numbers), 0, count)

    def insert(self, cache: PrefixCache, tokens: list[int]) -> None:
        """Let the target have such rows of `tokens`, as if they had been computed."""
        cache.insert(tokens, {names.TARGET: (len(tokens), self)})


def measure_context(options: argparse.Namespace) -> dict[str, Any]:
    """A row for every length, drafter, mode and budget. Raises `RequestError` for what the plan cannot do."""
    manifest = read_manifest(options.plan)
    partial = manifest.partial_kv
    if partial is None:
        raise RequestError(
            "The plan has no partial KV cache; build it with partial_kv.enabled, as reference-long.yaml."
        )
    modes = options.modes or list(PARTIAL_MODES)
    if wrong := [mode for mode in modes if mode not in PARTIAL_MODES]:
        raise RequestError(f"--modes names {wrong[0]!r}; the modes are {', '.join(PARTIAL_MODES)}.")
    least, most = partial.least_budget(manifest.target.widest_window), partial.n_retrieval_blocks
    if wrong := [budget for budget in options.budgets or [] if budget != "auto" and not least <= budget <= most]:
        raise RequestError(
            f"--budgets has {wrong[0]}; the plan has room for {most} blocks, and its layers see {least} or more."
        )
    known = [drafter.name for drafter in manifest.drafters]
    drafters = known if options.drafters is None else drafters_named(options.drafters, known)
    room = room_for_prompts(manifest.target.context, options.new)
    lengths = list(options.lengths or dict.fromkeys(min(length, room) for length in LENGTHS))
    if max(lengths) > room:
        raise RequestError(f"--lengths has {max(lengths)}; beside --new {options.new} the context leaves {room}.")
    cache = None
    if options.random_rows:
        cache = PrefixCacheConfig(max_cached_tokens=max(lengths) + 16, memory_bytes=2**40, enable_auto_eviction=False)
    runtime = Runtime.load(options.plan, threads=options.threads, prefix_cache=cache)
    held_out = [
        runtime.tokenizer.encode(prompt.text) for prompt in choose_prompts(options.plan, options.prompts, options.task)
    ]
    prompts = cut_prompts(held_out, max(lengths), room)[: options.count]
    budgets = options.budgets or [None]
    cases = [
        (mode, drafter, budget)
        for drafter in drafters
        for mode in sorted(modes, key=lambda mode: mode != OFF)
        for budget in (budgets if mode != OFF else [None])
    ]
    found: dict[tuple[Any, ...], list[Stats]] = {}
    same: dict[tuple[Any, ...], list[float]] = {}
    verify: dict[int, list[dict[Any, float | None]]] = {length: [] for length in lengths}
    with measuring([1.0] * len(prompts) * len(lengths) * (1 + len(cases) * options.reps)) as begin:
        for prompt in prompts:
            session = runtime.session()
            for length in lengths:
                begin(f"{length} tokens of context")
                tokens = prompt[-length:] if options.random_rows else prompt[:length]
                if options.random_rows:
                    assert runtime.prefix_cache is not None
                    session = runtime.session()
                    runtime.prefix_cache.clear()  # it has room for one length
                    RandomRows().insert(runtime.prefix_cache, tokens)
                verify[length].append(_verify_ms(session, tokens, runtime, options, budgets))

                def run(case: Any, tokens: list[int], _: int, session: Session = session) -> tuple[list[int], Stats]:
                    mode, drafter, budget = case
                    return _run(session, tokens, mode, drafter, budget, options)

                shown = within(f"{length} tokens of context", begin)
                made = run_in_turn(cases, [tokens], options.reps, run, warm_up=(), begin=shown)
                for (mode, drafter, budget), answers in made.items():
                    key = length, drafter, mode, budget
                    found.setdefault(key, []).extend(stats for _, stats in answers)
                    if (full := made.get((OFF, drafter, None))) is not None:
                        pairs = zip(full, answers, strict=True)
                        same.setdefault(key, []).extend(same_share(one[0], other[0]) for one, other in pairs)
    rows = []
    for (length, drafter, mode, budget), runs in found.items():
        plain = found.get((length, drafter, OFF, None))
        passes = {"full": [ms[OFF] for ms in verify[length]]}
        if mode != OFF:
            passes["partial"] = [ms[budget] for ms in verify[length]]
        row = _row(runs, plain, passes, same.get((length, drafter, mode, budget), []))
        rows.append({"context": length, "drafter": drafter, "mode": mode, "budget": budget, **row})
    return {
        **identity_columns(runtime, options),
        "partial_kv": partial.model_dump(),
        "new": options.new,
        "verified": len(_chain(runtime, prompts[0])[1]),
        "prompts": len(prompts),
        "random_rows": options.random_rows,
        "rows": rows,
    }


def _run(
    session: Session, tokens: list[int], mode: str, drafter: str, budget: Any, options: argparse.Namespace
) -> tuple[list[int], Stats]:
    settings = options.sampling | Options(
        max_new_tokens=options.new,
        drafter=drafter,
        partial_kv=mode,  # type: ignore[typeddict-item]
        partial_budget=budget,
        ignore_eos=True,
        auto_disable=not options.keep_drafting,
    )
    made = session.generate(tokens, whole=True, **settings)
    return made.token_ids, made.stats


def _verify_ms(
    session: Session, tokens: list[int], runtime: Runtime, options: argparse.Namespace, budgets: Sequence[Any]
) -> dict[Any, float | None]:
    """Milliseconds of a pass over the tip and a chain after it: over the full KV cache, as that of `OFF`, and over the
    partial one by budget; None where it is not in use."""
    host, chain = _chain(runtime, tokens)
    ms: dict[Any, float | None] = {}
    for budget in (OFF, *budgets):
        one = Options(max_new_tokens=1, drafter="none", ignore_eos=True)
        if budget != OFF:  # it fills the partial KV cache
            one |= Options(partial_kv="lossy", partial_budget=budget)
        session.generate(tokens, whole=True, **one)
        try:
            times = [session.time_round(chain, host, partial=budget != OFF) for _ in range(2 + 5 * options.reps)]
            ms[budget] = median(times[2:])  # the first ones find cold caches
        except RequestError:  # the partial KV cache stands for nothing
            ms[budget] = None
    return ms


def _chain(runtime: Runtime, tokens: list[int]) -> tuple[str, list[int]]:
    """Nodes verified after the tip, and the drafter whose round that is: n-grams', or without them the tip alone."""
    host = next((d.name for d in runtime.manifest.drafters if isinstance(d, HostDrafter)), "none")
    return host, [] if host == "none" else tokens[:_CHAIN]


def _row(
    runs: Sequence[Stats], plain: Sequence[Stats] | None, verify: dict[str, list[float | None]], same: list[float]
) -> dict[str, Any]:
    rates = [stats.decode_tokens_per_second for stats in runs]
    whole = sum(stats.total_ms for stats in runs)
    agreed, parted = sum(stats.agreed for stats in runs), sum(stats.parted for stats in runs)
    refreshing = sum(stats.stage_ms.get(stage, 0.0) for stats in runs for stage in _REFRESHING)
    passes = sum(stats.rounds for stats in runs)
    speedups = [a / p.decode_tokens_per_second for a, p in zip(rates, plain, strict=True)] if plain else []

    return {
        "verify_full_ms": middle(verify["full"]),
        "verify_partial_ms": middle(verify.get("partial", [])),
        "tokens_per_second": median(rates),
        "speedup": middle(speedups),
        "speedup_least": min(speedups, default=None),
        "speedup_most": max(speedups, default=None),
        "tokens_per_verify": sum(stats.new_tokens for stats in runs) / passes,
        "rounds": passes,
        "partial_rounds": sum(stats.partial_rounds for stats in runs),
        "retrieved": max(stats.retrieved for stats in runs),
        "agreement": agreed / (agreed + parted) if agreed + parted else None,
        "tentative": sum(stats.tentative for stats in runs),
        "retracted": sum(stats.retracted for stats in runs),
        "refreshes": sum(stats.refreshes for stats in runs),
        "refresh_share": refreshing / whole,
        "full_share": 1 - sum(stats.partial_ms for stats in runs) / whole,
        "same": middle(same),
        "runs": len(runs),
    }


def print_context(report: dict[str, Any], console: Console) -> None:
    print_head(report, console)
    rows = "rows of random numbers; " if report["random_rows"] else ""
    console.print(
        f"{rows}{report['prompts']} prompts, {report['new']} new tokens, {report['sampling']}, medians of "
        f"{report['reps']} runs\n"
        f"full, partial: ms of a pass over the tip and {report['verified']} tokens after it, over either cache; off: "
        "speedup over mode off, and its least and most;\na verify: tokens a round; agreed: see --help; back: tentative "
        "tokens that were taken back;\nfill: time that filling the partial cache takes; same: tokens before the first "
        "that differs from mode off"
    )
    console.print(make_table(_COLUMNS, report["rows"]))


_COLUMNS = (
    Column("context", "context"),
    Column("drafter", "drafter", text=True),
    Column("mode", "mode", text=True),
    Column("blocks", lambda row: f"{row['retrieved'] or '-'}{' auto' if row['budget'] == 'auto' else ''}"),
    Column("full", "verify_full_ms", ".1f"),
    Column("partial", "verify_partial_ms", ".1f"),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("off", "speedup", ".2f", "x"),
    Column("from-to", lambda row: row["speedup"] and "{speedup_least:.2f}-{speedup_most:.2f}".format_map(row)),
    Column("a verify", "tokens_per_verify", ".1f"),
    Column("agreed", "agreement", ".1%"),
    Column("back", lambda row: f"{row['retracted']}/{row['tentative']}" if row["tentative"] else None),
    Column("fill", "refresh_share", ".1%"),
    Column("same", "same", ".0%"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool(_parser, arguments, measure_context, print_context)


def _budgets(text: str) -> list[int | str]:
    return [word if word == "auto" else at_least_1(word) for word in map(str.strip, text.split(","))]


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.context",
        description="For a plan with partial KV: the time of a verify pass over either KV cache, and decoding after "
        "contexts of several lengths with drafters in every mode (off, lossless, lossy), in turn in one process. "
        "Agreement is the share of tokens that the partial cache gives as the full one does, where those before them "
        "did, as lossless mode finds it; same is the share of tokens before the first that differs from mode off.",
        epilog="example: %(prog)s build/long --drafters eagle3 --budgets 64,256,auto",
    )
    add_arguments(parser, "plan prompts drafters count new reps threads json", count=1, new=128, reps=3)
    parser.add_argument(
        "--task", metavar="NAME", help="contexts made of the prompts of one task alone (default: of all)"
    )
    parser.add_argument("--lengths", type=counts, metavar="N,...", help="tokens of context (1024 to 32768)")
    parser.add_argument("--modes", type=lambda text: text.split(","), metavar="MODE,...", help="(default: all three)")
    parser.add_argument(
        "--budgets", type=_budgets, metavar="N|auto,...", help="blocks to retrieve (default: the plan's)"
    )
    parser.add_argument(
        "--sampling", type=read_sampling, default=GREEDY, metavar="greedy|KEY=VALUE,...", help="as of latency"
    )
    parser.add_argument(
        "--keep-drafting",
        action="store_true",
        help="draft, and run ahead, even where the runtime sees that it does not pay, and verify whole drafts",
    )
    parser.add_argument(
        "--random-rows", action="store_true", help="keys and values of random numbers: no prefill, times alone"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
