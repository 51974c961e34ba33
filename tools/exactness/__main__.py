"""Exactness on a table: `python -m outrider.tools.exactness PLAN | --against URL [--json]`.

The same requests, greedy and at several temperatures, with penalties and structured outputs, are made again and again
while everything around them changes: drafters and how much these draft, company in a pass and when it arrives, branches
and sessions, what the prefix cache holds, interruptions, restarts, threads, and the processor's instructions. Each
condition has a row: how many requests `diverged`, which got other tokens (or another text or finish reason) than by
plain decoding, alone, cold, on one thread; and of how many others the `logprobs` have other bits. `seen` are figures
that show that a condition was what it says. Exit status 1 where our engine diverges.

With --against, any server of OpenAI's API is asked over HTTP, and compared with its own first answers. Few servers
promise that these are the same again: what differs is a finding about the server, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from outrider.commands.arguments import Parser, at_least_1
from outrider.commands.console import guarded
from outrider.plans.errors import RequestError
from outrider.runtime.exactness import Exactness
from outrider.tools.exactness.against import measure_server
from outrider.tools.exactness.measure import measure, print_groups, print_table
from outrider.tools.identity import describe_run
from outrider.tools.measuring import add_arguments, print_report

_QUICK = (8, 24)  # requests, and tokens of each
_WHOLE = (24, 48)


def main(arguments: Sequence[str] | None = None, called: str = "python -m outrider.tools.exactness") -> int:
    """Compare; `called` is what the user typed before the arguments."""
    return guarded(lambda: _run(_parser(called).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.plan is None and options.against is None:
        raise RequestError("There is nothing to compare; pass a PLAN, or --against URL.")
    _check_server_options(options)
    count, new = _QUICK if options.quick else _WHOLE
    options.requests, options.new = options.requests or count, options.new or new
    report = {**describe_run(), **(measure(options) if options.against is None else measure_server(options))}
    print_report(report, options.json, print_groups if options.groups else print_table)
    return int(report["ours"] and bool(report["diverged"] or report.get("failed_at_first")))


def _check_server_options(options: argparse.Namespace) -> None:
    if options.against is not None:
        return
    for name in ("against_drafting", "start", "start_drafting", "body", "drafting_body", "model"):
        if getattr(options, name):
            raise RequestError(f"--{name.replace('_', '-')} is about a server; pass --against URL too.")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'is {text!r}; pass a JSON object such as {{"drafter": "none"}}')
    return value


def _parser(called: str) -> Parser:
    parser = Parser(
        prog=called,
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""examples:
  {called} build/branches
  {called} build/branches --quick --drafters ngram
  {called} build/branches --against http://127.0.0.1:8000 --body '{{"drafter": "none"}}' \\
      --drafting-body '{{"drafter": "ngram"}}' \\
      --start 'outrider serve build/branches --port 8000'
  {called} --prompts plans/reference/held_out.jsonl.gz --against http://127.0.0.1:8001 \\
      --start 'python3 -m llama_cpp.server --model model.gguf --port 8001' \\
      --against-drafting http://127.0.0.1:8002 --start-drafting \\
      'python3 -m llama_cpp.server --model model.gguf --draft_model prompt-lookup-decoding --port 8002'""",
    )
    parser.add_argument("plan", type=Path, nargs="?", help="folder of a plan; with --against, whose prompts are used")
    parser.add_argument(
        "--requests", type=at_least_1, metavar="N", help=f"requests of every condition ({_WHOLE[0]}; quick {_QUICK[0]})"
    )
    parser.add_argument(
        "--new", type=at_least_1, metavar="N", help=f"most tokens of each ({_WHOLE[1]}; quick {_QUICK[1]})"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter requests, and the main conditions alone"
    )
    parser.add_argument("--groups", action="store_true", help="print a row for every group of conditions alone")
    add_arguments(parser, "prompts json")
    ours = parser.add_argument_group("our engine")
    ours.add_argument("--drafters", metavar="NAME,...", help="of the plan (default: all)")
    ours.add_argument(
        "--length", type=at_least_1, metavar="N",
        help="most tokens of a prompt (256, or fewer, so that all branches of the plan fit into a sequence)",
    )  # fmt: skip
    ours.add_argument("--backend", help="backend (default: the best this machine drives)")
    ours.add_argument(
        "--exactness", choices=get_args(Exactness), default="probed",
        help="unchecked: compare even where the plan's probe refuses to run on this machine",
    )  # fmt: skip
    server = parser.add_argument_group("a server")
    server.add_argument("--against", metavar="URL", help="address of a server of OpenAI's API")
    server.add_argument("--start", metavar="COMMAND", help="starts that server; rows of a restart need it")
    server.add_argument("--model", help="the name to ask for (default: the first of /v1/models)")
    server.add_argument("--body", type=_object, metavar="JSON", help="more fields of every request")
    server.add_argument("--against-drafting", metavar="URL", help="the same model on a server that drafts")
    server.add_argument("--start-drafting", metavar="COMMAND", help="starts the server that drafts")
    server.add_argument(
        "--drafting-body", type=_object, metavar="JSON", action="append",
        help="fields of requests that are drafted for; several times for several drafters",
    )  # fmt: skip
    server.add_argument("--at-once", type=at_least_1, default=8, help="requests in company (8)")
    server.add_argument("--characters", type=at_least_1, default=1000, help="most characters of a prompt (1000)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
