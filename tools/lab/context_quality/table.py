"""The report as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.tools.lab.context_quality.figures import RULES, Row, guessed
from outrider.tools.measuring import Column, figure, make_table


def print_table(report: dict[str, Any], console: Console) -> None:
    machine, memory = report["machine"], report["peak_rss_bytes"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, {report['threads']} threads; torch {report['torch']}, "
        f"{report['dtype']}; commit {report['git_sha']}; {report['seconds']:.0f} s, at most "
        f"{figure(memory and memory / 1e9, '.1f', ' GB')} of memory"
    )
    weights = report["checkpoint_sha256"].get("model.safetensors", "-")
    console.print(f"{report['recipe']}, context {report['context']}: {report['checkpoint']}, weights {weights[:12]}")
    scalings = ", ".join(f"the {name}'s {_scaling(scaling)}" for name, scaling in report["rope_scaling"].items())
    console.print(f"rope scaling: {scalings}; trained up to {report['trained_length']} tokens")
    console.print(
        "\nloss, nats a token, at positions from half of the length up to it; documents: "
        f"{report['documents']}, out of {report['held_out_files']} held-out files"
    )
    console.print(f"short: the same tokens in windows of {report['short_window']}, with the checkpoint's scaling")
    console.print(make_table(_LOSS, _flat(report["loss"])))
    console.print(f"\nquestions after contexts with {report['needles']} needles, right by the depth of the needle")
    console.print("any needle: answered with the name of one")
    console.print(_retrieval_table(report["retrieval"]))
    console.print("\nout of its depth, from the first length on at which, as at all longer ones:")
    for name, rule in report["rules"].items():
        console.print(f"  {name}: {rule}")
    console.print(_best(report["best_within_training"], report["needles"]))
    for name, verdict in report["out_of_its_depth"].items():
        console.print(f"with the {name}'s scaling: {_said(verdict)}")


def _flat(by_scaling: dict[str, list[Row]]) -> list[Row]:
    return [row | {"scaling": name} for name, rows in by_scaling.items() for row in rows]


_LENGTH = (Column("length", "length"), Column("scaling", "scaling", text=True))
_LOSS = (
    *_LENGTH, Column("tokens", "tokens"), Column("loss", "nats", ".3f"), Column("short", "short_nats", ".3f"),
    Column("difference", "difference", "+.3f"), Column("+-", "standard_error", ".3f"),
)  # fmt: skip
_RETRIEVAL = (
    *_LENGTH,
    Column("questions", "questions"),
    Column("any needle", lambda row: f"{row['any_needle']} ({row['any_share']:.0%})"),
    Column("right", lambda row: f"{row['right']} ({row['accuracy']:.0%})"),
)


def _retrieval_table(retrieval: dict[str, list[Row]]) -> Table:
    rows = _flat(retrieval)

    def share(place: int) -> Callable[[Row], str]:
        return lambda row: f"{row['by_depth'][place]['right'] / row['by_depth'][place]['questions']:.0%}"

    depths = [Column(f"at {each['depth']:.0%}", share(place)) for place, each in enumerate(rows[0]["by_depth"])]
    return make_table([*_RETRIEVAL, *depths], rows)


def _scaling(scaling: dict[str, Any]) -> str:
    return "none" if scaling["kind"] == "default" else f"{scaling['kind']} x{scaling['factor']:g}"


def _said(verdict: Row) -> str:
    if verdict["from"] is None:
        return "within its depth at all of these lengths"
    by = ", ".join(f"{name} {length}" for name, length in verdict.items() if name in RULES and length is not None)
    return f"out of its depth from {verdict['from']} tokens on ({by})"


def _best(best: dict[str, float] | None, needles: int) -> str:
    if best is None:
        return "questions: none was asked within the trained length with the checkpoint's scaling, so they say nothing"
    shares = f"at best {best['any_share']:.0%} any needle, {best['accuracy']:.0%} right"
    return f"questions within the trained length: {shares}" + (
        ", no more than guessing" if guessed(best, needles) else ""
    )
