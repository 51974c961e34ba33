"""What a prefix cache and shared passes bring: `python -m outrider.tools.lab.serving COMMAND PLAN`.

`hits`: the time to the first token of a prompt of which a share is known, against a cold start, and what the cache
itself takes. `load`: requests served at once against the same ones one after another, in both modes, and how long who
decodes waits for a pass. `memory`: what actors of one machine share. `routing`: conversations over replicas on Ray
Serve; prompt tokens that were computed, by how requests are routed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from outrider.commands.arguments import Parser, at_least_1, counts, whole_number
from outrider.commands.console import guarded
from outrider.tools.bench.sampling import GREEDY
from outrider.tools.identity import describe_run
from outrider.tools.lab.serving.actor_memory import measure_memory, print_memory
from outrider.tools.lab.serving.hits import measure_hits, print_hits
from outrider.tools.lab.serving.load import measure_load, print_load
from outrider.tools.lab.serving.routing import measure_routing, print_routing
from outrider.tools.measuring import add_arguments, print_report


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    return print_report({**describe_run(), **options.measure(options)}, options.json, options.show)


def _shares(text: str) -> list[int]:
    return [whole_number(1, 100)(word.strip()) for word in text.split(",")]


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.serving",
        description=__doc__.partition("\n\n")[2],
        epilog="example: %(prog)s load build/branches",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = Parser(add_help=False)
    add_arguments(plan, "plan prompts threads json")
    shared = Parser(add_help=False, parents=[plan])
    add_arguments(shared, "drafters")
    hits = commands.add_parser(
        "hits",
        parents=[shared],
        help="time to the first token of prompts that are partly known",
        description="Time to the first token of prompts of which the prefix cache knows a part, against a cold start.",
        epilog="example: %(prog)s build/branches --length 1500 --shares 50,90",
    )
    hits.add_argument("--length", type=at_least_1, default=1500, help="tokens of a prompt (1500)")
    hits.add_argument("--shares", type=_shares, default=[50, 90], metavar="N,...", help="per cent known (50,90)")
    hits.add_argument("--new", type=at_least_1, default=16, help="tokens that follow (16)")
    hits.add_argument("--count", type=at_least_1, default=6, help="prompts (6)")
    hits.set_defaults(measure=measure_hits, show=print_hits, reps=1)
    load = commands.add_parser(
        "load",
        parents=[shared],
        help="requests at once against one after another",
        description="Tokens a second of requests that are served at once, against the same one after another.",
        epilog="example: %(prog)s build/branches --at-once 4,16 --drafters none,ngram",
    )
    load.add_argument("--at-once", type=counts, metavar="N,...", help="requests at once (default: the plan's branches)")
    load.add_argument("--waves", type=at_least_1, default=3, help="requests for each that is served at once (3)")
    load.add_argument("--length", type=at_least_1, default=200, help="tokens of a prompt (200)")
    load.add_argument("--new", type=at_least_1, default=128, help="tokens of an answer (128)")
    add_arguments(load, "reps", reps=3)
    load.set_defaults(measure=measure_load, show=print_load)
    memory = commands.add_parser(
        "memory",
        help="what actors of one machine share",
        description="The proportional set size of actors that have loaded a plan and answered requests, and what a "
        "second one adds to that of the first. Needs the extra `ray`, and Linux.",
        epilog="example: %(prog)s build/branches",
    )
    add_arguments(memory, "plan json")
    memory.add_argument("--actors", type=whole_number(2), default=2, metavar="N", help="actors (2)")
    memory.add_argument("--length", type=at_least_1, default=200, help="characters of a prompt (200)")
    memory.add_argument("--new", type=at_least_1, default=16, help="tokens of an answer (16)")
    memory.add_argument(
        "--max-running", type=at_least_1, metavar="N", help="requests at once (default: the plan's branches)"
    )
    memory.add_argument("--unshared", action="store_true", help="without share_memory, for comparison")
    memory.set_defaults(measure=measure_memory, show=print_memory)
    routing = commands.add_parser(
        "routing",
        parents=[plan],
        help="conversations over replicas, routed by what each holds",
        description="Prompt tokens that replicas on Ray Serve compute for conversations of several turns, where each "
        "request goes to the replica that holds its beginning, and where requests go to replicas in turn. Needs the "
        "extra `ray`.",
        epilog="example: %(prog)s build/branches",
    )
    routing.add_argument("--conversations", type=at_least_1, default=8, metavar="N", help="conversations at once (8)")
    routing.add_argument("--turns", type=at_least_1, default=6, metavar="N", help="turns of each conversation (6)")
    routing.add_argument("--replicas", type=at_least_1, default=2, metavar="N", help="replicas (2)")
    routing.add_argument("--first", type=at_least_1, default=200, metavar="N", help="tokens of the first message (200)")
    routing.add_argument("--message", type=at_least_1, default=70, metavar="N", help="tokens of the others (70)")
    routing.add_argument("--new", type=at_least_1, default=215, metavar="N", help="tokens of an answer (215)")
    routing.set_defaults(measure=measure_routing, show=print_routing, reps=1)
    parser.set_defaults(sampling=GREEDY, task=None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
