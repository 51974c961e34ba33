"""`python -m outrider.runtime batch`: OpenAI's batch lines in, result lines out."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from outrider.commands.arguments import at_least_1
from outrider.plans.errors import RequestError
from outrider.runtime.cli.arguments import add_capacities, add_machine


def add_batch(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer a file of requests, OpenAI's batch lines or a parquet table, and write DIR/results.jsonl, "
        "ordered by custom_id. The same command continues where an earlier run was ended, killed or out of space. The "
        "results are the same, byte for byte, from one process, from a cluster of any size, and from continued runs. "
        "Requests that are wrong get results that say why. With --ray every node must see PLAN and DIR.",
        epilog="examples: %(prog)s build/branches prompts.jsonl --out build/answers; %(prog)s build/branches "
        "prompts.parquet --out /shared/answers --ray auto --cpus-per-actor 4",
    )
    add_machine(parser)
    add = parser.add_argument
    add("requests", type=Path, metavar="INPUT", help="file of JSON lines, or NAME.parquet")
    out = "folder of the results: a new one, or that of a run to resume"
    add("--out", type=Path, required=True, metavar="DIR", help=out)
    add("--model-name", help="the model that requests name (default: the plan's name)")
    add_capacities(parser)
    add(
        "--block-size",
        type=at_least_1,
        metavar="N",
        help="requests that are written together, and in one process lost together when it is killed (default: the "
        "number that the plan serves at once, at least 16); a resumed run keeps the first run's size",
    )
    add("--quiet", action="store_true", help="no progress")
    add("--json", action="store_true", help="print one JSON object at the end")
    ray = parser.add_argument_group("on a cluster", "Ray Data's actors, which load the plan once each (extra `ray`).")
    ray.add_argument("--ray", metavar="ADDRESS", help="HOST:PORT, ray://HOST:PORT or auto; local: one of its own")
    count = partial(ray.add_argument, type=at_least_1, metavar="N")
    count("--actors", help="actors (default: all that there is room for)")
    count("--cpus-per-actor", help="CPUs, and threads, of each (default: --threads, or 1)")
    parser.set_defaults(command=_batch)


def _batch(arguments: argparse.Namespace) -> int:
    if arguments.ray is None and (arguments.actors or arguments.cpus_per_actor):
        raise RequestError("--actors and --cpus-per-actor are of a cluster; add --ray ADDRESS, or leave them out.")
    from outrider.runtime.batch.run import run_batch  # the command's help needs none of it

    return run_batch(arguments)
