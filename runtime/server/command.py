"""`python -m outrider.runtime serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from outrider.commands.arguments import at_least_1, number, whole_number
from outrider.commands.console import stderr
from outrider.commands.packages import optional_packages
from outrider.commands.process import INTERRUPTED
from outrider.plans.errors import RequestError
from outrider.runtime.branch_request import MODES
from outrider.runtime.cli.arguments import add_capacities, add_machine, cache_of, load
from outrider.runtime.prefix_cache.file import check_folder
from outrider.runtime.request_queue import SchedulerConfig
from outrider.runtime.server.api_keys import check_shares, read_api_keys, share_of_queue
from outrider.runtime.server.config import Limits, LogFormat, ServerConfig

_KEY = "OUTRIDER_API_KEY"


def add_serve(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve the plan over HTTP",
        description="Serve the plan as OpenAI's clients know it: /v1/completions, /v1/chat/completions, streaming too, "
        "/v1/models, and /health/live, /health/ready and /metrics (Prometheus). Prompts that begin alike share KV, "
        "and each request has the tokens that it would have alone. Where the plan serves several branches "
        "(capacity.branches), requests share passes; a plan of one branch serves one request at a time. While the plan "
        "is loaded, the server listens, and is not ready. Needs the extra `serve`.",
        epilog="example: %(prog)s build/branches --port 8000 --log-format json",
    )
    add_machine(parser)
    add_serving(parser)
    add = parser.add_argument
    add("--cache-file", type=Path, metavar="FILE", help="load the prefix cache from FILE, and save it there at the end")
    seconds = {
        "head": "for a request's head; then the connection is closed",
        "body": "for a request's body; then the connection is closed",
        "send": "that a client may leave an answer unread; then likewise",
        "idle": "between requests on a connection; then likewise",
    }
    for name, what in seconds.items():
        most_seconds = getattr(Limits, f"{name}_seconds")
        help = f"seconds {what} ({most_seconds:g})"
        add(f"--{name}-seconds", type=number(above=0), default=most_seconds, metavar="N", help=help)
    most = "open connections; more are refused (1024, or fewer where the process may open few files)"
    add("--max-connections", type=at_least_1, metavar="N", help=most)
    parser.set_defaults(command=_serve)


def add_serving(parser: argparse.ArgumentParser) -> None:
    """Options of serving, on one machine or on many."""
    add = parser.add_argument
    count = partial(add, type=at_least_1, metavar="N")
    several = partial(add, action="append", default=[])
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    add("--port", type=whole_number(0, 65535), default=8000, help="port (default 8000; 0: any that is free)")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that clients must send; repeatable (default: {_KEY} of the environment; without any key, anybody is "
        "served)",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="file of more keys, one a line; # begins a comment")
    several(
        "--allow-host",
        dest="allow_hosts",
        metavar="NAME",
        help="name by which clients may ask without an API key, besides localhost and addresses (repeatable; *: any), "
        "so that no page of another site can have its own name lead here",
    )
    several(
        "--allow-origin",
        dest="allow_origins",
        metavar="URL",
        help="origin of pages, such as https://chat.example, that browsers let ask, besides those of this machine "
        "(repeatable; *: any)",
    )
    add(
        "--share-prefixes",
        action="store_true",
        help="API keys share the prefix cache: faster where they ask alike, and response times reveal to each what "
        "others have asked",
    )
    add("--protect-metrics", action="store_true", help="/metrics asks for an API key too")
    add("--model-name", help="the name that clients ask for (default: the plan's)")
    add_capacities(parser)
    count(
        "--max-waiting",
        default=SchedulerConfig.max_waiting,
        help="requests that may wait; more are refused with 429 (%(default)s)",
    )
    count("--max-waiting-per-key", help="those of one API key (default: half of --max-waiting; of a single key all)")
    count(
        "--max-choices",
        default=ServerConfig.max_choices,
        help="most choices of one request: prompts times n (%(default)s)",
    )
    count(
        "--tokens-per-minute",
        help="tokens of each API key, prompts and new tokens together; a request takes the most that it may use, and "
        "gives the rest back at its end (default: no limit)",
    )
    prefill = "most tokens of prompts in a pass in which other requests decode (default: the plan's prefill_chunk)"
    count("--prefill-tokens", help=prefill)
    add("--mode", choices=MODES, help="how requests share passes (default: a row each, where the plan has them)")
    count("--max-body-bytes", default=ServerConfig.max_body_bytes, help="larger bodies are refused (1 MiB)")
    drain = "seconds that requests have to finish after SIGTERM (%(default)g); then they are cut off"
    add("--drain-seconds", type=number(0), default=ServerConfig.drain_seconds, metavar="N", help=drain)
    add(
        "--log-format",
        choices=get_args(LogFormat),
        help="write a line about each request to standard error, and other messages in the same format (default: "
        "faults alone)",
    )
    add(
        "--telemetry",
        action="store_true",
        help="send a trace of each request by OpenTelemetry, as its variables say (OTEL_EXPORTER_OTLP_ENDPOINT, by "
        "default http://localhost:4318). Needs the extra `telemetry`",
    )


def _serve(arguments: argparse.Namespace) -> int:
    with optional_packages("The server", "serve"):
        from outrider.runtime.server.connections import most_connections
        from outrider.runtime.server.request_log import log_to_stderr
        from outrider.runtime.server.service import Service
    # Wrong options are refused before the plan is loaded, which takes a while.
    if arguments.cache_file is not None:
        if arguments.no_prefix_cache:
            raise RequestError("--cache-file is of the prefix cache; leave --no-prefix-cache out, or the file.")
        check_folder(arguments.cache_file)
    seconds = (arguments.head_seconds, arguments.body_seconds, arguments.send_seconds, arguments.idle_seconds)
    limits = Limits(*seconds, most_connections(arguments.max_connections))
    keys = read_keys(arguments)
    check_shares(arguments, bool(keys), "--api-key", option)
    config = ServerConfig.from_options(
        arguments, model=arguments.model_name or "", api_key=keys, log_requests=arguments.log_format is not None
    )
    cache = cache_of(arguments)
    scheduler = SchedulerConfig(
        arguments.max_running,
        arguments.max_waiting,
        arguments.prefill_tokens,
        arguments.mode,
        max_waiting_per_client=share_of_queue(arguments.max_waiting, arguments.max_waiting_per_key, len(keys)),
    )
    tracing = None
    if arguments.telemetry:
        with optional_packages("Telemetry", "telemetry"):
            from outrider.runtime.server.tracing import tracing_by_environment
        tracing = tracing_by_environment()
    with bound_socket(arguments.host, arguments.port) as bound:
        try:
            bound.listen()
        except OSError as error:  # another program was bound to the port too, and listened first
            raise RequestError(_why_not(arguments.host, arguments.port, error)) from None
        say: Callable[[str], object] = _print if arguments.log_format is None else logging.getLogger("outrider").info
        loading = partial(load, arguments, cache, scheduler, say=say)
        service = Service(loading, config, limits, say, tracing, interrupted=INTERRUPTED)
        if arguments.log_format is not None:
            log_to_stderr(arguments.log_format)  # after the server's making, which sets up loggers of its own
        if arguments.max_connections is None and limits.max_connections < Limits.max_connections:
            say(f"at most {limits.max_connections} connections at once, as this process may open few files")
        try:
            host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
            service.run(bound, f"http://{host}:{bound.getsockname()[1]}")
        finally:
            if tracing is not None:
                tracing.close()
    return 0


def _print(what: str) -> None:
    stderr.print(what, style="dim", soft_wrap=True)


def option(name: str) -> str:
    """The option of a name, as users spell it."""
    return f"--{name.replace('_', '-')}"


def read_keys(arguments: argparse.Namespace) -> list[str]:
    """API keys of the command line, and of its file; without either, that of the environment."""
    keys = list(arguments.api_key or ())
    if arguments.api_key_file is not None:
        keys += read_api_keys(arguments.api_key_file)
    if not keys and os.environ.get(_KEY):
        keys = [os.environ[_KEY]]
    return list(dict.fromkeys(keys))


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine, which listens to nobody yet. Raises RequestError where it cannot be."""
    if not host:
        raise RequestError("--host is empty; pass an address, such as 127.0.0.1, or 0.0.0.0 for all of this machine.")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, UnicodeError) as error:
        bound.close()
        raise RequestError(_why_not(host, port, error)) from None
    return bound


def _why_not(host: str, port: int, error: Exception) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"--host is {host!r}, which is no address that this machine can look up; pass one of its own."
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return f"Another program listens at port {port} of {host} already; pass another --port, or 0 for any."
    if number == errno.EADDRNOTAVAIL:
        return f"--host is {host!r}, which is no address of this machine; pass one of its own, such as 127.0.0.1."
    if number == errno.EACCES:
        return f"Port {port} is reserved to the system's administrator; pass a --port from 1024 on."
    return f"The server cannot listen at port {port} of {host}: {error}; pass another --host or --port."
