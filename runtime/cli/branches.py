"""`python -m outrider.runtime branches`: many continuations of one prompt, decoded together."""

from __future__ import annotations

import argparse
from typing import Any

from outrider.commands.arguments import at_least_1
from outrider.commands.console import print_json, stderr, stdout
from outrider.plans.errors import RequestError
from outrider.runtime.branch_request import MODES
from outrider.runtime.cli.arguments import (
    add_form,
    add_prompt,
    add_shared,
    generation_json,
    load,
    read_form,
    read_options,
    read_prompt,
)
from outrider.runtime.cli.side_by_side import SideBySide
from outrider.runtime.generation import Generation, Stream
from outrider.runtime.stats import Stats


def add_branches(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "branches",
        help="continue a prompt in several ways at once",
        description="Continue a prompt in several branches that share its KV: each begins with a --branch of its "
        "own, or --n ask for samples of the prompt itself. Every branch has the tokens that it would have alone, with "
        "the same seed and a stream of draws of its own. The plan must serve several branches (capacity.branches).",
        epilog="examples: %(prog)s build/branches --prompt 'import ' --branch os --branch sys; %(prog)s build/branches "
        "--prompt 'def main():' --n 4 --temperature 0.8",
    )
    add_shared(parser)
    add_prompt(parser)
    add_form(parser)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--branch", action="append", metavar="TEXT", help="what a branch begins with after the prompt; repeatable"
    )
    asked.add_argument("--n", type=at_least_1, metavar="N", help="N samples of the prompt; pass a --temperature too")
    parser.add_argument(
        "--mode", choices=MODES, default=MODES[0],
        help="all in one row of the KV cache (default), or a row each; the tokens are the same",
    )  # fmt: skip
    parallel = "branches at once (default: all that the plan has room for)"
    parser.add_argument("--max-parallel", type=at_least_1, metavar="N", help=parallel)
    stream = "show the branches side by side as they grow; without a terminal, print each as it ends"
    parser.add_argument("--stream", action="store_true", help=stream)
    parser.add_argument("--json", action="store_true", help="print one JSON object: branches and stats")
    parser.set_defaults(command=_branches)


def _branches(arguments: argparse.Namespace) -> int:
    prompt = read_prompt(arguments)
    options = read_options(arguments)
    options["structured_outputs"] = read_form(arguments)
    if arguments.n is not None and arguments.n > 1 and not arguments.temperature:
        raise RequestError("Greedy samples are all the same; add --temperature, or leave --n out.")
    runtime = load(arguments)
    stream = runtime.stream_branches(
        prompt, arguments.branch, n=arguments.n, max_parallel=arguments.max_parallel, mode=arguments.mode, **options
    )
    if arguments.json:
        found = [generation_json(result) for result in stream.results]
        print_json({"branches": found, "stats": stream.stats.to_json()})
        return 0
    titles = arguments.branch or [f"sample {number}" for number in range(arguments.n)]
    if arguments.stream:
        _show(stream, titles)
    else:
        for number, result in enumerate(stream.results):
            _print(number, titles[number], result)
    stderr.print(_summary(stream.stats), style="dim")
    return 0


def _show(stream: Stream, titles: list[str]) -> None:
    if not stdout.is_terminal:
        for each in stream:
            if each.result is not None:
                _print(each.sequence, titles[each.sequence], each.result)
        return
    with SideBySide(stdout, titles) as view:
        for each in stream:
            view.add(each.sequence, each.text)
            if each.result is not None:
                view.end(each.sequence, each.result.finish_reason.value)


def _print(number: int, title: str, result: Generation) -> None:
    stderr.print(f"branch {number}, {title!r} ({result.finish_reason.value}):", style="dim", markup=False)
    print(result.text)


def _summary(stats: Stats) -> str:
    return (
        f"{stats.new_tokens} tokens in {stats.rounds} passes, {stats.tokens_per_second:.0f} tokens/s, "
        f"{stats.kv_bytes / 1e6:.1f} MB of keys and values, {stats.bytes_copied / 1e6:.1f} MB copied"
    )
