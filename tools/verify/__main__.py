"""Compare a plan with its checkpoint: `outrider verify PLAN [--oracle auto|transformers|decoder] [--json]`."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.commands.arguments import Parser, at_least_1
from outrider.commands.console import guarded, print_json, progress_bar, stdout
from outrider.commands.packages import optional_packages
from outrider.compiler.arguments import add_recipe, recipe_of

if TYPE_CHECKING:
    from outrider.tools.parting import Parting
    from outrider.tools.verify.exactness import ExactnessCheck

_SHOWN = 10  # tokens that differ, in the text


def main(arguments: list[str] | None = None, called: str = "python -m outrider.tools.verify") -> int:
    """Run the command; `called` is what the user typed before the arguments."""
    return guarded(lambda: _run(_parser(called).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    with optional_packages("The command", "compiler"):
        return _verify(options)


def _parser(called: str) -> Parser:
    parser = Parser(
        prog=called,
        description="Compare a plan with its checkpoint, run by transformers in float32, on the recipe's held-out "
        "text: logits, greedy tokens, near ties. Every drafter's tokens are compared with those of plain decoding. "
        "On the CPU, every op is run in 1 to 32 rows on this machine: a row must have the same bits in any company. "
        "Exit status 1 if a logit is further off than rounding explains, a token differs where it is no near tie, or a "
        "row has other bits.",
        epilog=f"example: {called} build/reference --count 2",
    )
    parser.add_argument("plan", type=Path, help="folder of the plan")
    add_recipe(parser)
    parser.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...} (default: the recipe\'s held_out)')
    parser.add_argument("--count", type=at_least_1, default=8, help="prompts to run (default 8)")
    parser.add_argument("--new-tokens", type=at_least_1, default=64, help="greedy tokens per prompt (default 64)")
    parser.add_argument(
        "--texts",
        type=at_least_1,
        help="held-out prompts on which what quantised weights cost is measured (default: all)",
    )
    parser.add_argument(
        "--oracle", choices=("auto", "transformers", "decoder"), default="auto",
        help="what runs the checkpoint: transformers, or Outrider's own decoder, which reads config.json as the build "
        "did (default: transformers where it is installed)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _verify(options: argparse.Namespace) -> int:
    from outrider.tools.verify.verification import verify_plan

    recipe = recipe_of(options)
    with progress_bar("verifying prompts") as progress:
        result = verify_plan(
            recipe,
            options.plan,
            held_out=options.prompts,
            prompts=options.count,
            new_tokens=options.new_tokens,
            texts=options.texts,
            oracle=options.oracle,
            progress=lambda done, total: progress(done, total, ""),
        )
    if options.json:
        print_json(result.to_json())
    else:
        stdout.print(
            f"against {result.oracle}: {result.prompts} prompts, {result.tokens} tokens, largest logit error "
            f"{result.max_logit_error:.2e} (at most {result.logit_bound:.0e}), {result.equal_runs} runs with equal "
            "greedy tokens"
        )
        if (cost := result.quantization) is not None:
            stdout.print(
                f"the oracle has the plan's quantised weights; against the checkpoint's own: {cost.same_tokens:.1%} of "
                f"tokens the same, divergence {cost.kl:.4f} nats, {cost.texts} held-out texts take "
                f"{cost.bits_per_byte:.4f} bits a byte in place of {cost.float_bits_per_byte:.4f} ({cost.growth:+.2%})"
            )
        _print_differences(result.divergences, ("oracle", "plan"), result.tolerance)
        for how, checks in (("greedy", result.drafters), ("sampled", result.sampled)):
            for name, check in checks.items():
                stdout.print(
                    f"drafter {name}, {how}: {check.tokens_per_verify:.2f} tokens per verify, {check.equal_runs} runs "
                    "with the tokens of plain decoding"
                )
                _print_differences(check.partings, ("plain", "drafted"), result.tolerance)
        _print_exactness(result.exactness)
        partial = result.partial_kv
        if partial is not None and partial.runs == 0:
            stdout.print(f"partial KV was not checked: contexts of {partial.context} tokens leave no room for the run")
        elif partial is not None:
            stdout.print(
                f"partial KV, after {partial.context} tokens: lossless {partial.lossless_equal_runs} of "
                f"{partial.runs} runs with the tokens of full KV; lossy drifts: {_share(partial.agreement)} of tokens "
                f"as with full KV where those before are, {partial.lossy_equal_runs} runs the same, "
                f"{_share(partial.same)} of tokens before the first that differs"
            )
        stdout.print(f"the plan {'agrees' if result.passed else 'does NOT agree'} with its checkpoint")
    return 0 if result.passed else 1


def _print_exactness(check: ExactnessCheck | None) -> None:
    if check is None:
        return
    stdout.print(
        f"exactness on {check.processor}, ONNX Runtime {check.onnxruntime}: {check.ops} ops in 1 to 32 rows, chunks of "
        f"up to {check.largest_chunk} tokens: " + ("the same bits in any company" if check.passed else "NOT exact")
    )
    for op in check.inexact_ops:
        kind = "DIFFERENT" if op.decides else "only drafts differ"
        threads = {0: "all threads", 1: "1 thread"}.get(op.threads, f"{op.threads} threads")
        stdout.print(f"  {op.op}: {kind}, on {threads}, in {_ranges(op.rows)} rows", markup=False)
    if check.inexact_chunks:
        stdout.print(f"  target: DIFFERENT logits in chunks of {_ranges(check.inexact_chunks)} tokens")


def _ranges(sizes: Sequence[int]) -> str:
    """Ascending numbers as text, those in a row as a range."""
    firsts = [size for size in sizes if size - 1 not in sizes]
    lasts = [size for size in sizes if size + 1 not in sizes]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True))


def _print_differences(found: Sequence[Parting], named: tuple[str, str], tolerance: float) -> None:
    """A line for each of the first; `named` says who chose the expected and the found token."""
    for each in found[:_SHOWN]:
        kind = "near tie" if each.near_tie else "DIFFERENT"
        stdout.print(
            f"  prompt {each.prompt}, token {each.index}: {kind}, {named[0]} {each.expected}, {named[1]} {each.found}, "
            f"margin {each.margin:.2e} (tolerance {tolerance:.2e})"
        )
    if len(found) > _SHOWN:
        stdout.print(f"  and {len(found) - _SHOWN} more (--json lists all)")


def _share(value: float | None) -> str:
    return "no" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    sys.exit(main())
