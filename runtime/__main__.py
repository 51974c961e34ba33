"""`python -m outrider.runtime generate | branches | skeleton | serve | batch | chat | embed | options`."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import sys
from contextlib import suppress
from functools import partial
from typing import cast

from outrider.commands.arguments import Parser, at_least_1, number
from outrider.commands.console import guarded, print_json, report_error, stderr
from outrider.plans.errors import RequestError
from outrider.runtime.batch.command import add_batch
from outrider.runtime.beam_search import BeamOptions, BeamResult, EarlyStopping
from outrider.runtime.cli.arguments import (
    add_form,
    add_prompt,
    add_shared,
    flag_of,
    generation_json,
    load,
    read_form,
    read_options,
    read_prompt,
)
from outrider.runtime.cli.branches import add_branches
from outrider.runtime.cli.debug import RoundPrinter, log_to
from outrider.runtime.cli.options import add_options
from outrider.runtime.cli.skeleton import add_skeleton
from outrider.runtime.embed.command import add_embed
from outrider.runtime.generation import Generation
from outrider.runtime.server.command import add_serve

_EARLY_STOPPING: dict[str, EarlyStopping] = {"false": False, "true": True, "never": "never"}
_OF_BEAMS = {"length_penalty", "early_stopping", "num_return"}
_WITH_BEAMS = {
    "plan", "backend", "threads", "exactness", "prompt", "prompt_file", "token_ids", "max_new_tokens", "ignore_eos",
    "eos_token_ids", "json",
}  # fmt: skip


def main(arguments: list[str] | None = None, called: str = "python -m outrider.runtime") -> int:
    """Run a command; `called` is what the user typed before its name."""

    def run() -> int:
        options = _parser(called).parse_args(arguments)
        return int(options.command(options))

    return guarded(run)


def _parser(called: str) -> Parser:
    parser = Parser(
        prog=called,
        description="Generate text from a plan.",
        epilog=f'example: {called} generate build/reference --prompt "def main():" --stream',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt. The same seed gives the same tokens with every drafter, or none (of drafters "
        "with acceptance: rejection, the same distribution).",
        epilog='examples: %(prog)s build/reference --prompt "def main():" --stream; %(prog)s build/reference --prompt '
        '"import os" --drafter ngram --temperature 0.8 --seed 7 --json',
    )
    add_shared(generate)
    message = "a message to the model, by its chat template, in place of a prompt"
    add_prompt(generate).add_argument("--message", help=message)
    add_form(generate)
    generate.add_argument("--stream", action="store_true", help="print text as it is committed")
    one = "print one JSON object: text token_ids finish_reason seed stats"
    generate.add_argument("--json", action="store_true", help=one)
    generate.add_argument(
        "--debug",
        action="store_true",
        help="print each round on standard error: its position, the drafted tokens with the drafter's probability that "
        "the target chooses them (dDEPTH<PARENT), + accepted, - not chosen, = the target's own token after them; r "
        "and p/q decide by rejection. Drafting that is stopped because it does not pay is printed as well",
    )
    beams = generate.add_argument_group("beam search", "A baseline that follows several continuations at once.")
    count = partial(beams.add_argument, type=at_least_1, metavar="N")
    count("--beams", help="search with N beams; --json prints beams and stats")
    penalty = "score: log-probability / tokens ** X (default 1)"
    beams.add_argument("--length-penalty", type=number(), metavar="X", help=penalty)
    beams.add_argument(
        "--early-stopping",
        choices=_EARLY_STOPPING,
        help="once N have ended: end (true), or continue while a live beam scores better as it is (false, the "
        "default), or could at any length (never)",
    )
    count("--num-return", help="print the N best (default 1)")
    generate.set_defaults(command=_generate, parser=generate)

    add_branches(commands)
    add_skeleton(commands)
    add_serve(commands)
    add_batch(commands)
    chat = commands.add_parser(
        "chat",
        help="talk with the model",
        description="Talk with the model; an empty line or end of input leaves.",
        epilog='example: %(prog)s build/chat --system "Answer in one sentence."',
    )
    add_shared(chat)
    add_form(chat)
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--json", action="store_true", help="print one JSON object per reply")
    chat.set_defaults(command=_chat)

    add_embed(commands)
    add_options(commands)
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.beams is not None:
        return _beam_search(arguments)
    if given := _given(arguments, _OF_BEAMS):
        raise RequestError(f"{given[0]} is an option of beam search; add --beams N, or leave it out.")
    prompt = None if arguments.message is not None else read_prompt(arguments)
    messages = [{"role": "user", "content": arguments.message}] if prompt is None else None
    options = read_options(arguments)
    options["structured_outputs"] = read_form(arguments)
    runtime = load(arguments)
    if arguments.debug:
        options["on_round"] = RoundPrinter(runtime.tokenizer, stderr)
        log_to(stderr)
    stream = runtime.stream(prompt, messages=messages, **options)
    if arguments.json:
        print_json(generation_json(stream.result))
        return 0
    if arguments.stream:
        for span in stream:
            print(span.text, end="", flush=True)
    else:
        print(stream.result.text, end="")
    print(flush=True)  # before the lines on stderr
    stderr.print(_summary(stream.result, runtime.manifest.target.context), style="dim")
    return 0


def _beam_search(arguments: argparse.Namespace) -> int:
    others = set(vars(arguments)) - _WITH_BEAMS - _OF_BEAMS - {"beams"}
    if excluded := _given(arguments, others):
        why = "beam search draws and drafts nothing, and has no text before its end"
        raise RequestError(f"{excluded[0]} cannot go with --beams: {why}. Leave one of them out.")
    prompt = read_prompt(arguments)
    given = {name: getattr(arguments, name) for name in ("beams", "max_new_tokens", "length_penalty", "num_return")}
    options = cast(BeamOptions, {name: value for name, value in given.items() if value is not None})
    if arguments.early_stopping is not None:
        options["early_stopping"] = _EARLY_STOPPING[arguments.early_stopping]
    if arguments.ignore_eos or arguments.eos_token_ids is not None:
        options["eos_token_ids"] = [] if arguments.ignore_eos else arguments.eos_token_ids
    results = load(arguments).beam_search(prompt, **options)
    if arguments.json:
        print_json(beams_json(results))
        return 0
    for result in results:
        print(result.text, flush=True)
        tokens = f"{len(result.token_ids)} tokens ({result.finish_reason.value})"
        stderr.print(f"score {result.score:.4f}, {tokens}", style="dim")
    return 0


def _given(arguments: argparse.Namespace, options: set[str]) -> list[str]:
    """Options that are not at their defaults, as they are spelled on the command line."""
    default = arguments.parser.get_default
    return [flag_of(name) for name in sorted(options) if getattr(arguments, name) != default(name)]


def _chat(arguments: argparse.Namespace) -> int:
    runtime = load(arguments)
    runtime.tokenizer.check_chat()
    options = read_options(arguments)
    options["structured_outputs"] = read_form(arguments)
    session = runtime.session()
    session.stream([0], whole=True, **options).close()  # wrong options end the command, not a turn
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages, interactive = list(opening), sys.stdin.isatty() and not arguments.json
    if interactive:
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  (`input` then has lines that can be edited, and those before)
        stderr.print(f"{runtime.manifest.name}: /reset begins anew, an empty line or Ctrl-D ends", style="dim")
    while True:
        try:
            line = input("" if arguments.json else "> ")
        except EOFError:
            return 0
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"standard input cannot be read as {sys.stdin.encoding} text: {error}") from None
        if not line.strip():
            return 0
        if line.strip() == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = session.stream(messages=messages, **options)
        except RequestError as error:  # such as a turn too long: the conversation continues without it
            report_error(error)
            messages.pop()
            continue
        if not arguments.json:
            for span in stream:
                print(span.text, end="", flush=True)
            print(flush=True)
        reply = stream.result
        if interactive:
            stderr.print(_summary(reply, runtime.manifest.target.context), style="dim")
        if arguments.json:
            print_json(generation_json(reply))
        messages.append({"role": "assistant", "content": reply.text})


def beams_json(results: list[BeamResult]) -> dict[str, object]:
    """The stable keys of `--beams --json`."""
    return {
        "beams": [
            {"text": r.text, "token_ids": r.token_ids, "score": r.score, "finish_reason": r.finish_reason.value}
            for r in results
        ],
        "stats": results[0].stats.to_json(),
    }


def _summary(generation: Generation, context: int) -> str:
    stats, reason = generation.stats, generation.finish_reason.value
    if reason == "length" and stats.prompt_tokens + stats.new_tokens >= context:
        reason += f": the context of {context} tokens is full"
    return (
        f"{stats.new_tokens} tokens ({reason}), {stats.decode_tokens_per_second:.0f} tokens/s, "
        f"{stats.tokens_per_verify:.2f} tokens per verify, first token after {stats.ttft_ms:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
