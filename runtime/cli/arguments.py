"""Arguments that several commands have, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast, get_args

from outrider.commands.arguments import at_least_0, at_least_1, number
from outrider.commands.console import stderr
from outrider.plans.errors import RequestError
from outrider.plans.text_file import read_all, read_text_file
from outrider.runtime.exactness import Exactness
from outrider.runtime.generation import Generation
from outrider.runtime.options.kinds import Biases, Choice, Real, Switch, Texts, TokenIds, Whole
from outrider.runtime.options.options import OPTIONS, Doors, Option, Options, offered
from outrider.runtime.prefix_cache.cache import PrefixCacheConfig
from outrider.runtime.request_queue import SchedulerConfig
from outrider.runtime.runtime import Runtime
from outrider.runtime.text.structured_outputs import StructuredOutputs


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The plan, and where it runs."""
    add = parser.add_argument
    add("plan", type=Path, help="folder of the plan")
    add("--backend", help="backend (default: the best this machine drives)")
    threads = "CPU threads of the target and of large drafters; 0 lets the backend choose (%(default)s)"
    add("--threads", type=at_least_0, default=0, help=threads)
    add("--no-cuda-graphs", action="store_true", help="on a GPU, launch kernel by kernel in place of recorded graphs")
    add(
        "--exactness",
        choices=get_args(Exactness),
        default="probed",
        help="on a CPU, unchecked: run the plan even where drafts and neighbours may change its tokens (default: "
        "probed, once on each machine, and refused there)",
    )


def add_capacities(parser: argparse.ArgumentParser) -> None:
    """How many requests run at once, and the prefix cache of all of them."""
    count, default = partial(parser.add_argument, type=at_least_1, metavar="N"), PrefixCacheConfig()
    count("--max-running", help="requests at once (default: those that the plan has branches for)")
    count("--cache-tokens", default=default.max_cached_tokens, help="prefix cache: most tokens (%(default)s)")
    memory = f"prefix cache: most memory ({default.memory_bytes >> 30} GiB), allocated at once"
    count("--cache-bytes", default=default.memory_bytes, help=memory)
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")


def cache_of(arguments: argparse.Namespace) -> PrefixCacheConfig | None:
    """The prefix cache that `add_capacities` has taken."""
    if arguments.no_prefix_cache:
        return None
    return PrefixCacheConfig(max_cached_tokens=arguments.cache_tokens, memory_bytes=arguments.cache_bytes)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """The plan, where it runs, and the options of a generation, which are None where they are left out."""
    add_machine(parser)
    for name, option in offered(Doors.COMMAND).items():
        spelling = _spelling(option)
        help = (option.flag_help or option.help) + ("; repeatable" if spelling.get("action") == "append" else "")
        known = option.default not in (None, ()) and not isinstance(option.default, bool)
        help += f" (default {option.default})" if known else ""
        parser.add_argument(flag_of(name), dest=name, help=help, **spelling)


def flag_of(name: str) -> str:
    """The flag of an option on the command line."""
    flag = OPTIONS[name].flag if name in OPTIONS else None
    return flag or f"--{name.replace('_', '-')}"


def _spelling(option: Option) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for an option."""
    match option.kind:
        case Whole() as kind:
            return {"type": partial(_number, kind), "metavar": "|".join(["N", *kind.words])}
        case Real() as kind:
            return {"type": partial(_number, kind), "metavar": "X"}
        case Switch():
            return {"action": "store_const", "const": not option.default}
        case Choice() as kind:
            return {"choices": kind.words}
        case Texts():
            return {"action": "append", "metavar": "TEXT"}
        case TokenIds():
            return {"type": _token_ids, "metavar": "IDS"}
        case Biases() as kind:
            return {"action": "append", "type": partial(_bias, kind.most), "metavar": "TOKEN=X"}
        case _:
            return {"metavar": "NAME"}


def _number(kind: Whole | Real, text: str) -> Any:
    """Read a number without spaces and underscores, or one of the words of the kind."""
    value: object = text
    with suppress(ValueError):
        if isinstance(kind, Real):
            value = float(text)
        elif text.isascii() and text.isdigit():
            value = int(text)
    try:
        return kind.check(value, "it")
    except RequestError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}; {str(error).rstrip('.').partition('; ')[2]}") from None


def _bias(most: float, text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), number(-most, most)(bias)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; pass a token id and a number from {-most:g} to {most:g}, such as 50256={-most:g}"
        ) from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"is {text!r}; pass whole numbers separated by commas, such as 12,7,99"
        ) from None


def add_form(parser: argparse.ArgumentParser) -> None:
    """The form that the text keeps to."""
    group = parser.add_argument_group("structured outputs", "The text keeps to a form; at most one of them.")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON of the schema in the file")
    form.add_argument("--json-object", action="store_true", help="any JSON object")
    form.add_argument("--regex", metavar="PATTERN", help="text that the regular expression matches as a whole")
    form.add_argument("--grammar", type=Path, metavar="FILE", help="text of the grammar, for Lark or llama.cpp")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeatable")


def read_form(arguments: argparse.Namespace) -> StructuredOutputs | None:
    """What `add_form` has taken. Raises `RequestError` for a file that cannot be read."""
    if arguments.json_schema is not None:
        return {"json": _read_text("--json-schema", arguments.json_schema)}
    if arguments.json_object:
        return {"json_object": True}
    if arguments.regex is not None:
        return {"regex": arguments.regex}
    if arguments.grammar is not None:
        return {"grammar": _read_text("--grammar", arguments.grammar)}
    return None if arguments.choice is None else {"choice": arguments.choice}


def read_options(arguments: argparse.Namespace) -> Options:
    """Options of a generation, of those that `add_shared` has added."""
    if arguments.logprobs is not None and not arguments.json:
        raise RequestError("--logprobs are printed with --json only; add it.")
    given = {name: getattr(arguments, name) for name in offered(Doors.COMMAND)}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return cast(Options, {name: value for name, value in given.items() if value is not None})


def load(
    arguments: argparse.Namespace,
    prefix_cache: PrefixCacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    *,
    say: Callable[[str], object] | None = None,
) -> Runtime:
    """The plan, loaded; `say` as of `report_loading`."""
    with stderr.status(f"loading {arguments.plan}"):
        runtime = Runtime.load(
            arguments.plan,
            backend=arguments.backend,
            threads=arguments.threads,
            cuda_graphs=not arguments.no_cuda_graphs,
            prefix_cache=prefix_cache,
            scheduler=scheduler,
            exactness=arguments.exactness,
        )
    report_loading(runtime, say)
    return runtime


def report_loading(runtime: Runtime, say: Callable[[str], object] | None = None) -> None:
    """Say why better backends were passed over, and that the machine was probed (default: on standard error)."""
    say = say or partial(stderr.print, style="dim", soft_wrap=True)
    for backend, reason in runtime.passed_over.items():
        say(f"runs on {runtime.backend}, not on {backend}: {reason}")
    if runtime.probed is not None and not runtime.probed.remembered:
        say(runtime.probed.text)


def add_prompt(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """The three ways to pass a prompt; returns their group."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the prompt's text")
    prompt.add_argument("--prompt-file", type=Path, help="a file with the prompt's text; - for standard input")
    prompt.add_argument("--token-ids", type=_token_ids, metavar="IDS", help="the prompt as ids, separated by commas")
    return prompt


def read_prompt(arguments: argparse.Namespace) -> str | list[int]:
    """The prompt that `add_prompt` has taken. Raises `RequestError` for what cannot be read."""
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.token_ids is not None:
        return list(arguments.token_ids)
    return _read_text("--prompt-file", arguments.prompt_file)


def _read_text(option: str, path: Path) -> str:
    """The text of a file; - is standard input."""
    try:
        if str(path) == "-":
            if isinstance(sys.stdin, TextIOWrapper):
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # as files are read, in any locale
            return read_all(sys.stdin)
        return read_text_file(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {path} cannot be read as UTF-8 text: {error}") from None


def generation_json(generation: Generation) -> dict[str, object]:
    """The stable keys of `--json`."""
    value: dict[str, object] = {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason.value,
        "seed": generation.seed,
        "stats": generation.stats.to_json(),
    }
    if generation.logprobs:
        value["logprobs"] = [
            {"token_id": t.token_id, "logprob": t.logprob, "top": [list(pair) for pair in t.top]}
            for t in generation.logprobs
        ]
    return value
