"""`python -m outrider.runtime.ray_serve`: its options, and the life of what it starts."""

from __future__ import annotations

import argparse
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

from outrider.commands.arguments import Parser, at_least_0, at_least_1, number
from outrider.commands.console import guarded, stderr
from outrider.commands.packages import optional_packages
from outrider.plans.errors import OutriderError, RequestError
from outrider.plans.plan import open_plan
from outrider.runtime.cli.arguments import add_machine
from outrider.runtime.ray_serve.following import Failover
from outrider.runtime.ray_serve.settings import Routing, Settings, check_replicas
from outrider.runtime.server.api_keys import check_shares
from outrider.runtime.server.command import add_serving, bound_socket, option, read_keys

_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
_ANSWERS = 15.0  # seconds for ingresses to answer, after the time that they drain


def main(arguments: list[str] | None = None, called: str = "python -m outrider.runtime.ray_serve") -> int:
    """Run the command; `called` is what the user typed."""
    return guarded(lambda: _serve(_parser(called).parse_args(arguments)))


def _parser(called: str) -> Parser:
    parser = Parser(
        prog=called,
        description="Serve the plan as the command `serve` does, by several replicas on the machines of a Ray "
        "cluster. Requests that share a beginning go to the replica that holds it. A request whose replica dies "
        "continues at another one, with the same tokens; its client notices nothing. The plan's folder must be at the "
        "same path on every machine. What --log-format writes is in Ray's log files of the ingresses "
        "(logs/worker-*.err of Ray's folder on their machines). Without --ray, a cluster of this machine alone is "
        "started, and ended with the command. Needs the extra `ray`.",
        epilog="example: %(prog)s build/branches --replicas 2 --threads 4 --port 8000",
    )
    add_machine(parser)
    parser.set_defaults(threads=1)
    add_serving(parser)
    add = parser.add_argument
    count = partial(add, type=at_least_1, metavar="N")
    running = "address of a running cluster, such as auto or 10.0.0.1:6379 (default: start one here)"
    add("--ray", metavar="ADDRESS", help=running)
    add("--name", default="outrider", help="name of the application on the cluster (outrider)")
    add("--route-prefix", default="/", metavar="PATH", help="path under which the application is served (/)")
    count("--replicas", help="replicas at the start (1)")
    count("--min-replicas", help="fewest replicas, while there is little to do (default: --replicas)")
    count("--max-replicas", help="most replicas, under load (default: --replicas)")
    count(
        "--target-ongoing",
        help="requests under way at each replica, running or waiting, above which replicas are added (default: the "
        "number that one runs at once)",
    )
    ongoing = "requests that a replica takes at once; others wait at the ingresses (default: twice what it runs)"
    count("--max-ongoing", help=ongoing)
    count("--ingresses", default=1, help="processes that take requests (1)")
    cpus = partial(add, type=number(0), metavar="N")
    cpus("--replica-cpus", help="CPUs that Ray sets aside for a replica (default: --threads)")
    cpus("--replica-gpus", default=0.0, help="GPUs that Ray sets aside for a replica (0)")
    add(
        "--routing",
        choices=get_args(Routing),
        default="prefix",
        help="prefix: to the replica that holds the request's beginning, load permitting; balanced: to the less loaded "
        "of two; round-robin: to each in turn, for measuring (prefix)",
    )
    losses = "replicas that one request may lose before it fails (%(default)s)"
    add("--losses", type=at_least_0, default=Failover.losses, metavar="N", help=losses)
    patience = "longest that a request waits for a replica to take it (%(default)g)"
    add("--patience", type=number(above=0), default=Failover.patience, metavar="SECONDS", help=patience)
    proxies = "which machines of the cluster listen at --host and --port, where Ray Serve does not run yet (HeadOnly)"
    add("--proxies", choices=("HeadOnly", "EveryNode"), default="HeadOnly", help=proxies)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    with optional_packages("Serving on Ray", "ray"):
        import ray
        from ray import serve

        from outrider.runtime.ray_cluster import cluster
        from outrider.runtime.ray_serve.application import build
    settings = _settings(arguments)
    if settings.telemetry:
        with optional_packages("Telemetry", "telemetry"):
            import outrider.runtime.server.tracing  # noqa: F401  # ingresses import it
    application = build(settings)
    name = settings.model_name or open_plan(settings.plan, verify=False).manifest.name
    if arguments.ray is None:
        with bound_socket(arguments.host, arguments.port) as bound:
            arguments.port = bound.getsockname()[1]
    with cluster(arguments.ray, settings.cpus):
        served_before = _CONTROLLER in (each["name"] for each in ray.util.list_named_actors(all_namespaces=True))
        if served_before and arguments.name in serve.status().applications:
            raise RequestError(f"The cluster serves an application {arguments.name!r} already; pass another --name.")
        try:
            serve.start(arguments.proxies, {"host": arguments.host, "port": arguments.port})
            try:
                handle = serve.run(application, name=arguments.name, route_prefix=arguments.route_prefix)
            except RuntimeError as error:
                raise OutriderError(
                    f"The application does not start: {error}; Ray's log of the replicas (logs/serve under Ray's "
                    "folder) says why."
                ) from None
            ended, hurried = _signals()
            if served_before:
                where = f"under {arguments.route_prefix} where the cluster listens: not by --host and --port"
            else:
                where = f"at http://{arguments.host}:{arguments.port}{arguments.route_prefix.rstrip('/')}"
            stderr.print(f"serving {name!r} by {settings.replicas} replicas {where}", style="dim", soft_wrap=True)
            ended.wait()
            _drain(handle, settings.drain_seconds, hurried)
        finally:
            _delete(arguments.name, served_before)
    return 0


def _delete(name: str, served_before: bool) -> None:
    """Delete the application; end Ray Serve too, where the command started it and nobody else serves by it now."""
    from ray import serve

    present = set(serve.status().applications)
    if not served_before and present <= {name}:
        serve.shutdown()
    elif name in present:
        serve.delete(name)


def _settings(arguments: argparse.Namespace) -> Settings:
    keys = read_keys(arguments)
    check_shares(arguments, bool(keys), "--api-key", option)
    check_replicas(arguments, option)
    same = set(Settings.model_fields) & set(vars(arguments))
    values: dict[str, Any] = {name: getattr(arguments, name) for name in same}
    values |= {
        "plan": Path(arguments.plan).resolve(),
        "api_keys": tuple(keys),
        "api_key_file": None,  # whose keys are among these
        "replicas": arguments.replicas or arguments.min_replicas or 1,
        "prefix_cache": not arguments.no_prefix_cache,
        "cuda_graphs": not arguments.no_cuda_graphs,
    }
    return Settings(**values)


def _signals() -> tuple[threading.Event, threading.Event]:
    """Events for the first SIGTERM or SIGINT, and for a second one."""
    ended, hurried = threading.Event(), threading.Event()

    for number_of in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_of, lambda *_: (hurried if ended.is_set() else ended).set())
    return ended, hurried


def _drain(handle: Any, seconds: float, hurried: threading.Event) -> None:
    """Have all ingresses (`handle` is theirs) finish their requests, for `seconds`, or until a second signal."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    with suppress(RayError, RayServeException, TimeoutError):
        draining = handle.broadcast("drain", seconds)
        over = threading.Event()

        def wait() -> None:
            with suppress(RayError, RayServeException, TimeoutError):
                draining.results(timeout_s=seconds + _ANSWERS)
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        while not over.wait(0.1):
            if hurried.is_set():
                handle.broadcast("drain", 0.0).results(timeout_s=_ANSWERS)
                return
