"""`outrider bench latency | sweep | suite | startup`: what it costs, on this machine."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from outrider.commands.arguments import Parser, at_least_1, counts
from outrider.commands.console import guarded
from outrider.commands.packages import optional_packages
from outrider.plans.errors import OutriderError
from outrider.plans.plan import read_manifest
from outrider.runtime.cli.arguments import add_form, read_form
from outrider.tools.bench.sampling import GREEDY, read_sampling
from outrider.tools.bench.shapes import choose_drafters, read_depths, read_trees, takes_trees
from outrider.tools.identity import describe_run
from outrider.tools.measuring import add_arguments, print_report

SWEPT = (64, 256, 1024, 4096)  # tokens of prompts
TREES = ("1/1/3", "1/3/5", "2/3/8", "2/6/12", "3/6/16", "own")  # of 2 to 15 drafted tokens: what a CPU may pay for
_TREE = "draft trees of drafters that have one: each TOP_K/DEPTH/NODES, as a recipe's tree; own is the plan's"


def main(arguments: list[str] | None = None, called: str = "python -m outrider.tools.bench") -> int:
    """Run a measurement; `called` is what the user typed before its name."""
    return guarded(lambda: _run(sys.argv[1:] if arguments is None else arguments, called))


def _run(arguments: list[str], called: str) -> int:
    options = _parser(called).parse_args(arguments)
    with optional_packages("This benchmark", "compiler"):
        return int(options.command(options))


def _parser(called: str) -> Parser:
    parser = Parser(prog=called, description=__doc__, epilog=f"example: {called} latency build/reference")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    latency = commands.add_parser(
        "latency",
        help="plain decoding against the plan's drafters",
        description="Run plain decoding and drafters alternately on held-out prompts in one process, by wall clock: "
        "tokens/s, paired speedup, tokens per verify, how long a user waits for the first token (ttft) and between two "
        "pieces of text (gap: a round's time), and whether the tokens are the same; with "
        "--stages also milliseconds a round by stage, and what of a round no engine accounts for (host gap). --json "
        "has every sample too. With --tree or --depth, drafters run once for "
        "each shape of draft, in a temporary plan built for it.",
        epilog="examples: %(prog)s build/reference --drafters ngram,eagle3 "
        "--sampling temperature=0.7; %(prog)s build/reference --drafters eagle3 "
        "--tree own,2/3/6",
    )
    _add_measuring(latency, count=12)
    latency.add_argument(
        "--prompt-len", type=_length, metavar="N", help="prompts of exactly N tokens, made of the held-out ones"
    )
    latency.add_argument("--tree", type=read_trees, metavar="TREE,...", help=_TREE)
    latency.add_argument(
        "--keep-drafting",
        action="store_true",
        help="draft even where the runtime would see that it does not pay, and verify whole drafts",
    )
    latency.set_defaults(command=_latency)
    sweep = commands.add_parser(
        "sweep",
        help="the same over lengths of prompts and draft trees",
        description="The measurement of latency at every length of prompt with every draft tree, in one process: a "
        "plan of all trees is built first (temporary; a minute or so for each tree of a small drafter). Plain decoding "
        "is measured anew at every length, and speedups are over that. Drafters always draft, as with latency's "
        "--keep-drafting.",
        epilog="example: %(prog)s build/reference --drafters eagle3 --prompt-len 64,512 --tree 1/3/5,2/3/8,2/6/10",
    )
    _add_measuring(sweep, count=4)
    sweep.add_argument(
        "--prompt-len", type=counts, metavar="N,...",
        help=f"lengths of prompts (default: {', '.join(map(str, SWEPT))}, as far as the context has room)",
    )  # fmt: skip
    sweep.add_argument(
        "--tree",
        type=read_trees,
        metavar="TREE,...",
        help=f"{_TREE} (default: {','.join(TREES)}, without --depth and where a drafter takes them)",
    )
    sweep.set_defaults(command=_sweep, keep_drafting=True)

    suite = commands.add_parser(
        "suite",
        help="drafters on question files of your own, by category",
        description="Run plain decoding and drafters alternately on question files in Spec-Bench's format, or that of "
        "DeepSpec's evaluation data, in one process: speedup, mean accepted tokens (tokens per verify) and acceptance "
        "rate by category and overall. Questions of several turns go through one session turn after turn, through the "
        "plan's chat template where it has one. Answers end by themselves, or after --new tokens.",
        epilog="examples: %(prog)s build/plan question.jsonl --count 10 --new 256; "
        "%(prog)s build/plan gsm8k.jsonl mt-bench.jsonl --drafters ngram",
    )
    add_arguments(suite, "plan")
    suite.add_argument("files", type=Path, nargs="+", metavar="FILE.jsonl", help="questions, a JSON object a line")
    suite.add_argument(
        "--count", type=at_least_1, metavar="N", help="the first N questions of each category (default: all)"
    )
    suite.add_argument("--raw", action="store_true", help="turns as they are, without the plan's chat template")
    suite.add_argument(
        "--keep-drafting", action="store_true", help="draft even where the runtime would see that it does not pay"
    )
    suite.add_argument("--tree", type=read_trees, metavar="TREE,...", help=_TREE)
    _add_drafting(suite, reps=1)
    _add_output(suite)
    suite.set_defaults(command=_suite, task=None, form=None, synthetic_accept=None)

    startup = commands.add_parser(
        "startup",
        help="from nothing to the first token",
        description="Start fresh processes one after another: time to import the runtime, to load the plan, and to "
        "the first token of a short prompt. Medians and spread.",
        epilog="example: %(prog)s build/reference --reps 9",
    )
    add_arguments(startup, "plan reps threads json", reps=5)
    startup.set_defaults(command=_startup)
    return parser


def _add_measuring(command: argparse.ArgumentParser, count: int) -> None:
    """Add the arguments that `latency` and `sweep` share."""
    add_arguments(command, "plan prompts")
    command.add_argument(
        "--task",
        metavar="NAME",
        help="prompts of one task alone (default: of all, in turn); edit: files, each asked for again with a name "
        "changed, made of those of the task long",
    )
    add_arguments(command, "count", count=count)
    _add_drafting(command, reps=3)
    add_form(command)
    command.add_argument(
        "--synthetic-accept", type=_length_of_path, metavar="LEN",
        help="for studies of cost: accept LEN tokens of every draft, or as far as it reaches, for any target "
        "(0: none). All stages run; the tokens are not the target's, and every row with them says synthetic. Drafters "
        "always draft; only on onnxruntime-cpu. Overwriting the logits costs about 1 %% of a round, which stays in the "
        "figures",
    )  # fmt: skip
    _add_output(command)


def _add_drafting(command: argparse.ArgumentParser, reps: int) -> None:
    """Add the arguments of what is drafted, how tokens are chosen, and on what."""
    command.add_argument(
        "--drafters",
        metavar="NAME|KIND,...",
        help="by name, or all of a kind (ngram, model, eagle3, block); none, plain decoding, always runs (default: "
        "all)",
    )
    command.add_argument(
        "--depth", type=read_depths, metavar="N,...",
        help="drafts of at most N tokens one after another: n-grams of N nodes, chains of N tokens, trees of "
        "N levels with no more nodes than they have; own is what the plan has. Not together with --tree",
    )  # fmt: skip
    add_arguments(command, "new reps threads", new=128, reps=reps)
    command.add_argument(
        "--sampling", type=read_sampling, default=GREEDY, metavar="greedy|KEY=VALUE,...",
        help="how tokens are chosen: greedy (default), or temperature with any of top_k, top_p, min_p and seed, such "
        "as temperature=0.7,top_p=0.9,seed=3",
    )  # fmt: skip
    command.add_argument("--backend", help="backend (default: the best that this machine drives)")
    command.add_argument("--recipe", type=Path, help="for --tree and --depth: the recipe (default: the plan's own)")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="for --tree and --depth: what the plan was built with; may be repeated",
    )  # fmt: skip


def _add_output(command: argparse.ArgumentParser) -> None:
    """Add the arguments of what is printed and written."""
    printed = command.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print one JSON object, a row for each drafter and tree")
    printed.add_argument(
        "--csv", action="store_true", help="print a line for each row and each task, always with the same columns"
    )
    printed.add_argument("--markdown", action="store_true", help="print the main figures as a Markdown table")
    command.add_argument("--stages", action="store_true", help="also print where a round's milliseconds go, by stage")


def _length(text: str) -> tuple[int, ...]:
    return (at_least_1(text),)


def _length_of_path(text: str) -> int:
    return 0 if text == "0" else at_least_1(text)


def _sweep(options: argparse.Namespace) -> int:
    from outrider.tools.bench.prompts import room_for_prompts

    manifest = read_manifest(options.plan)
    drafters = choose_drafters(manifest.drafters, options.drafters)
    if options.tree is None and options.depth is None and any(map(takes_trees, drafters)):
        options.tree = read_trees(",".join(TREES))
    if options.prompt_len is None:
        room = room_for_prompts(manifest.target.context, options.new)
        options.prompt_len = [length for length in SWEPT if length <= room] or [room]
    return _latency(options)


def _latency(options: argparse.Namespace) -> int:
    from outrider.tools.bench.latency import measure

    options.form = read_form(options)
    if options.form is not None and options.synthetic_accept is not None:
        raise OutriderError("--synthetic-accept accepts what no form allows; leave out one of the two.")
    _prepare(options)
    return _print_drafting({**describe_run(), **measure(options)}, options)


def _suite(options: argparse.Namespace) -> int:
    from outrider.tools.bench.suite import measure

    _prepare(options)
    return _print_drafting({**describe_run(), **measure(options)}, options)


def _prepare(options: argparse.Namespace) -> None:
    """Refuse what can be refused before anything is read."""
    if options.tree is not None and options.depth is not None:
        raise OutriderError("--tree and --depth both say what is drafted; pass one of them.")


def _print_drafting(report: dict[str, Any], options: argparse.Namespace) -> int:
    from outrider.tools.bench.columns import to_csv
    from outrider.tools.bench.tables import print_table, to_markdown

    if options.csv:
        print(to_csv(report), end="", flush=True)
    elif options.markdown:
        print(to_markdown(report), flush=True)
    else:
        print_report(report, options.json, partial(print_table, stages=options.stages))
    return 0


def _startup(options: argparse.Namespace) -> int:
    from outrider.tools.bench.startup import measure, print_table

    return print_report({**describe_run(), **measure(options)}, options.json, print_table)


if __name__ == "__main__":
    sys.exit(main())
