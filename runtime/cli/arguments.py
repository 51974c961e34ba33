"""Arguments that several commands have, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import get_args

from outrider.commands.arguments import at_least_0, at_least_1, number, whole_number
from outrider.commands.console import stderr
from outrider.plans.errors import RequestError
from outrider.plans.partial_kv import PARTIAL_MODES
from outrider.plans.text_file import read_all, read_text_file
from outrider.runtime.exactness import Exactness
from outrider.runtime.generation import Generation
from outrider.runtime.logits_options import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY
from outrider.runtime.prefix_cache.cache import PrefixCacheConfig
from outrider.runtime.request import Options
from outrider.runtime.runtime import Runtime
from outrider.runtime.scheduler import SchedulerConfig
from outrider.runtime.text.structured_outputs import StructuredOutputs


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The plan, and where it runs."""
    parser.add_argument("plan", type=Path, help="folder of the plan")
    parser.add_argument("--backend", help="backend (default: the best this machine drives)")
    parser.add_argument(
        "--threads",
        type=at_least_0,
        default=0,
        help="CPU threads of the target and of large drafters; 0 lets the backend choose (%(default)s)",
    )
    parser.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="on a GPU, launch kernel by kernel what would be recorded at loading",
    )
    parser.add_argument(
        "--exactness",
        choices=get_args(Exactness),
        default="probed",
        help="on a CPU, unchecked: run the plan even where drafts and neighbours may change its tokens (default: "
        "probed, once on each machine, and refused there)",
    )


def add_capacities(parser: argparse.ArgumentParser) -> None:
    """How many requests run at once, and the prefix cache of all of them."""
    parser.add_argument(
        "--max-running", type=at_least_1, metavar="N", help="requests at once (default: as many as can be)"
    )
    default = PrefixCacheConfig()
    parser.add_argument(
        "--cache-tokens",
        type=at_least_1,
        default=default.max_cached_tokens,
        metavar="N",
        help="prefix cache: most tokens (%(default)s)",
    )
    parser.add_argument(
        "--cache-bytes",
        type=at_least_1,
        default=default.memory_bytes,
        metavar="N",
        help=f"prefix cache: most memory ({default.memory_bytes >> 30} GiB), taken at once",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")


def cache_of(arguments: argparse.Namespace) -> PrefixCacheConfig | None:
    """The prefix cache that `add_capacities` has taken."""
    if arguments.no_prefix_cache:
        return None
    return PrefixCacheConfig(max_cached_tokens=arguments.cache_tokens, memory_bytes=arguments.cache_bytes)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """The plan, where it runs, and how tokens are chosen."""
    add_machine(parser)
    parser.add_argument("--max-new-tokens", type=at_least_1, default=128, help="most tokens to generate (default 128)")
    parser.add_argument("--temperature", type=number(0), default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=at_least_0, default=0, help="keep the k most probable tokens; 0 is off")
    parser.add_argument(
        "--top-p", type=number(most=1, above=0), default=1.0, help="keep the most probable tokens up to p; 1 is off"
    )
    parser.add_argument(
        "--min-p", type=number(0, 1), default=0.0,
        help="keep tokens at least this share as probable as the most probable one; 0 is off",
    )  # fmt: skip
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**64 - 1),
        help="seed of the draws (default: a new one each time, printed by --json)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; up to 16 times"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past end tokens")
    parser.add_argument(
        "--filter-order",
        choices=("temperature_first", "temperature_last"),
        default="temperature_first",
        help="temperature before top-k, top-p and min-p (default), or after them",
    )
    parser.add_argument(
        "--stream-id", type=at_least_0, default=0, metavar="N", help="which of the seed's streams of draws"
    )
    _add_logits_options(parser)
    parser.add_argument("--drafter", metavar="NAME|none", help="drafter of the plan (default: its first)")
    parser.add_argument("--draft-tokens", type=at_least_1, metavar="N", help="draft at most N tokens a pass")
    parser.add_argument("--draft-depth", type=at_least_1, metavar="N", help="at most N of them one behind another")
    parser.add_argument(
        "--gamma-min",
        type=at_least_1,
        metavar="N",
        help="shortest chain of a drafter whose chains are as long as it is sure",
    )
    parser.add_argument("--gamma-max", type=at_least_1, metavar="N", help="longest of these chains")
    parser.add_argument(
        "--partial-kv",
        choices=PARTIAL_MODES,
        help="behind long contexts, where the plan has a partial KV cache (its mode)",
    )
    parser.add_argument(
        "--partial-budget", type=_budget, metavar="N|auto", help="blocks that it retrieves (its budget)"
    )
    parser.add_argument(
        "--keep-drafting",
        action="store_true",
        help="draft even while that costs more than it brings, by the clock, and verify whole drafts",
    )
    parser.add_argument(
        "--skip-sample-adjustment",
        action="store_true",
        help="for debugging drafters with acceptance: rejection: draw a rejected token's replacement from the target's "
        "own distribution, which is wrong",
    )


def _add_logits_options(parser: argparse.ArgumentParser) -> None:
    """Options that change logits; their meanings are those of `runtime.logits_options`."""
    penalty = number(-MAX_PENALTY, MAX_PENALTY)
    parser.add_argument(
        "--presence-penalty",
        type=penalty,
        default=0.0,
        metavar="X",
        help="off a generated token's logit, once; -2 to 2",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=penalty,
        default=0.0,
        metavar="X",
        help="off a generated token's logit, as often as it was generated; -2 to 2",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=number(above=0, most=MAX_REPETITION_PENALTY),
        default=1.0,
        metavar="X",
        help="logits of tokens of the prompt and the text are divided by it, those below 0 multiplied; 1 is off",
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        type=_bias,
        metavar="TOKEN=X",
        help="add X, -100 to 100, to the logit of a token id; repeatable",
    )
    parser.add_argument(
        "--min-tokens",
        type=at_least_0,
        default=0,
        metavar="N",
        help="no end token, and no end by --stop, before N tokens",
    )
    parser.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="never complete this text; repeatable"
    )
    parser.add_argument(
        "--allowed-token-ids", type=_token_ids, metavar="IDS", help="the only tokens that may come, separated by commas"
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), number(-MAX_BIAS, MAX_BIAS)(bias)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; pass a token id and a number from -100 to 100, such as 50256=-100"
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


def _budget(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a number of blocks, or auto")
    return text if text == "auto" else int(text)


def read_options(arguments: argparse.Namespace) -> Options:
    """Options of a generation from what `add_shared` has added."""
    options = Options(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        filter_order=arguments.filter_order,
        stream_id=arguments.stream_id,
        auto_disable=not arguments.keep_drafting,
        skip_sample_adjustment=arguments.skip_sample_adjustment,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        repetition_penalty=arguments.repetition_penalty,
        logit_bias=dict(arguments.logit_bias),
        min_tokens=arguments.min_tokens,
        bad_words=arguments.bad_word,
        allowed_token_ids=arguments.allowed_token_ids,
        draft_tokens=arguments.draft_tokens,
        draft_depth=arguments.draft_depth,
        gamma_min=arguments.gamma_min,
        gamma_max=arguments.gamma_max,
    )
    if arguments.drafter is not None:
        options["drafter"] = arguments.drafter
    if arguments.partial_kv is not None:
        options["partial_kv"] = arguments.partial_kv
    if arguments.partial_budget is not None:
        options["partial_budget"] = arguments.partial_budget
    return options


def load(
    arguments: argparse.Namespace,
    prefix_cache: PrefixCacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    *,
    say: Callable[[str], object] | None = None,
) -> Runtime:
    """The plan, loaded; `say` as of `tell_of_loading`."""
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
    tell_of_loading(runtime, say)
    return runtime


def tell_of_loading(runtime: Runtime, say: Callable[[str], object] | None = None) -> None:
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
    prompt.add_argument("--token-ids", help="the prompt as token ids, separated by commas")
    return prompt


def read_prompt(arguments: argparse.Namespace) -> str | list[int]:
    """The prompt that `add_prompt` has taken. Raises `RequestError` for what cannot be read."""
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.token_ids is not None:
        try:
            return [int(part) for part in arguments.token_ids.split(",")]
        except ValueError:
            raise RequestError(
                f"--token-ids is {arguments.token_ids!r}; pass whole numbers separated by commas, such as 12,7,99."
            ) from None
    return _read_text("--prompt-file", arguments.prompt_file)


def _read_text(option: str, path: Path) -> str:
    """The text of a file; - is standard input."""
    try:
        if str(path) == "-":
            if isinstance(sys.stdin, TextIOWrapper):
                sys.stdin.reconfigure(
                    encoding="utf-8-sig", errors="strict"
                )  # as files are read, whatever the locale says
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
