"""`python -m runtime serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from plans.arguments import at_least_0, at_least_1, whole_number
from plans.console import stderr
from plans.errors import RequestError
from runtime.arguments import add_machine, load
from runtime.branch_request import MODES
from runtime.prefix_cache import PrefixCacheConfig
from runtime.prefix_file import check_folder
from runtime.scheduler import SchedulerConfig

_KEY = "OUTRIDER_API_KEY"


def add_serve(commands: Any) -> None:
    """Add the command to those of `python -m runtime`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve the plan over HTTP",
        description="Serve the plan as OpenAI's clients know it: /v1/completions, /v1/chat/completions, streaming too, "
        "/v1/models, and /health and /metrics (Prometheus). Requests share passes and what was computed of earlier "
        "ones; each has the tokens that it would have alone. The plan must serve several branches "
        "(capacity.branches). Needs the extra `serve`.",
        epilog="example: %(prog)s build/branches --port 8000",
    )
    add_machine(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    parser.add_argument(
        "--port", type=whole_number(0, 65535), default=8000, help="port (default 8000; 0: any that is free)"
    )
    parser.add_argument(
        "--api-key", help=f"key that clients must send (default: what {_KEY} holds; without either, anybody is served)"
    )
    parser.add_argument("--model-name", help="the name that clients ask for (default: the plan's)")
    parser.add_argument(
        "--max-running", type=at_least_1, metavar="N", help="requests at once (default: as many as can be)"
    )
    parser.add_argument(
        "--max-waiting", type=at_least_1, default=1024, metavar="N", help="before more are refused (1024)"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=at_least_1,
        metavar="N",
        help="most tokens of prompts in a pass in which others decode: what a newcomer may delay them by (default: the "
        "plan's prefill_chunk)",
    )
    parser.add_argument("--mode", choices=MODES, help="of branches (default: a row each, where the plan has them)")
    parser.add_argument(
        "--cache-tokens", type=at_least_1, default=65536, metavar="N", help="prefix cache: most tokens (65536)"
    )
    parser.add_argument(
        "--cache-bytes",
        type=at_least_1,
        default=2**30,
        metavar="N",
        help="prefix cache: most memory (1 GiB), taken at once",
    )
    parser.add_argument(
        "--cache-file",
        type=Path,
        metavar="FILE",
        help="take in what FILE holds of earlier prompts, and save there at the end what the cache holds then",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")
    parser.add_argument(
        "--max-body-bytes", type=at_least_1, default=2**20, metavar="N", help="larger bodies are refused (1 MiB)"
    )
    parser.add_argument(
        "--drain-seconds",
        type=at_least_0,
        default=30,
        metavar="N",
        help="for requests to end, once the server is to (30)",
    )
    parser.set_defaults(command=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        import uvicorn

        from runtime.server.app import ServerConfig, make_app
    except ModuleNotFoundError as error:
        raise RequestError(
            f"The server needs {error.name}, which is not installed; run `pip install 'outrider[serve]'`."
        ) from None
    file = arguments.cache_file
    if file is not None and arguments.no_prefix_cache:
        raise RequestError("--cache-file is of the prefix cache; leave --no-prefix-cache out, or the file.")
    if file is not None:
        check_folder(file)  # now, not when the server ends
    cache = None
    if not arguments.no_prefix_cache:
        cache = PrefixCacheConfig(max_cached_tokens=arguments.cache_tokens, memory_bytes=arguments.cache_bytes)
    scheduler = SchedulerConfig(arguments.max_running, arguments.max_waiting, arguments.prefill_tokens, arguments.mode)
    runtime = load(arguments, cache, scheduler)
    runtime.start()
    if file is not None and file.exists():
        stderr.print(f"{runtime.load_prefix_cache(file)} tokens of earlier prompts are warm", style="dim")
    config = ServerConfig(
        model=arguments.model_name or runtime.manifest.name,
        api_key=arguments.api_key or os.environ.get(_KEY) or None,
        max_body_bytes=arguments.max_body_bytes,
        drain_seconds=arguments.drain_seconds,
        cache_file=file,
    )
    server = uvicorn.Config(
        make_app(runtime, config),
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=arguments.drain_seconds,
    )
    bound = server.bind_socket()  # it says why, and ends, where it cannot
    address = f"http://{arguments.host}:{bound.getsockname()[1]}"
    stderr.print(f"serving {config.model!r} at {address}", style="dim", soft_wrap=True)
    uvicorn.Server(server).run([bound])
    return 0
