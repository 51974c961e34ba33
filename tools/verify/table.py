"""A verification as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from outrider.tools.parting import Parting
from outrider.tools.verify.exactness import ExactnessCheck
from outrider.tools.verify.verification import Verification

_SHOWN = 10  # tokens that differ


def print_verification(result: Verification, console: Console) -> None:
    console.print(
        f"against {result.oracle}: {result.prompts} prompts, {result.tokens} tokens, largest logit error "
        f"{result.max_logit_error:.2e} (at most {result.logit_bound:.0e}), {result.equal_runs} runs with equal "
        "greedy tokens"
    )
    if (cost := result.quantization) is not None:
        console.print(
            f"the oracle has the plan's quantised weights; against the checkpoint's own: {cost.same_tokens:.1%} of "
            f"tokens the same, divergence {cost.kl:.4f} nats, {cost.texts} held-out texts take "
            f"{cost.bits_per_byte:.4f} bits a byte in place of {cost.float_bits_per_byte:.4f} ({cost.growth:+.2%})"
        )
    _print_differences(result.divergences, ("oracle", "plan"), result.tolerance, console)
    for how, checks in (("greedy", result.drafters), ("sampled", result.sampled)):
        for name, check in checks.items():
            console.print(
                f"drafter {name}, {how}: {check.tokens_per_verify:.2f} tokens per verify, {check.equal_runs} runs "
                "with the tokens of plain decoding"
            )
            _print_differences(check.partings, ("plain", "drafted"), result.tolerance, console)
    _print_exactness(result.exactness, console)
    partial = result.partial_kv
    if partial is not None and partial.runs == 0:
        console.print(f"partial KV was not checked: contexts of {partial.context} tokens leave no room for the run")
    elif partial is not None:
        console.print(
            f"partial KV, after {partial.context} tokens: lossless {partial.lossless_equal_runs} of "
            f"{partial.runs} runs with the tokens of full KV; lossy drifts: {_share(partial.agreement)} of tokens "
            f"as with full KV where those before are, {partial.lossy_equal_runs} runs the same, "
            f"{_share(partial.same)} of tokens before the first that differs"
        )
    console.print(f"the plan {'agrees' if result.passed else 'does NOT agree'} with its checkpoint")


def _print_exactness(check: ExactnessCheck | None, console: Console) -> None:
    if check is None:
        return
    console.print(
        f"exactness on {check.processor}, ONNX Runtime {check.onnxruntime}: {check.ops} ops in 1 to 32 rows, chunks of "
        f"up to {check.largest_chunk} tokens: " + ("the same bits in any company" if check.passed else "NOT exact")
    )
    for op in check.inexact_ops:
        kind = "DIFFERENT" if op.decides else "only drafts differ"
        threads = {0: "all threads", 1: "1 thread"}.get(op.threads, f"{op.threads} threads")
        console.print(f"  {op.op}: {kind}, on {threads}, in {_ranges(op.rows)} rows", markup=False)
    if check.inexact_chunks:
        console.print(f"  target: DIFFERENT logits in chunks of {_ranges(check.inexact_chunks)} tokens")


def _ranges(sizes: Sequence[int]) -> str:
    """Ascending numbers as text, those in a row as a range."""
    firsts = [size for size in sizes if size - 1 not in sizes]
    lasts = [size for size in sizes if size + 1 not in sizes]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True))


def _print_differences(found: Sequence[Parting], named: tuple[str, str], tolerance: float, console: Console) -> None:
    """A line for each of the first; `named` says who chose the expected and the found token."""
    for each in found[:_SHOWN]:
        kind = "near tie" if each.near_tie else "DIFFERENT"
        console.print(
            f"  prompt {each.prompt}, token {each.index}: {kind}, {named[0]} {each.expected}, {named[1]} {each.found}, "
            f"margin {each.margin:.2e} (tolerance {tolerance:.2e})"
        )
    if len(found) > _SHOWN:
        console.print(f"  and {len(found) - _SHOWN} more (--json lists all)")


def _share(value: float | None) -> str:
    return "no" if value is None else f"{value:.1%}"
