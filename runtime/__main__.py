"""`python -m runtime generate | chat`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plans.console import guarded, print_json, report_error, stderr
from plans.errors import RequestError
from runtime.beam_search import BeamOptions, BeamResult, EarlyStopping
from runtime.debug import RoundPrinter, log_to
from runtime.generation import Generation
from runtime.request import Options
from runtime.runtime import Runtime

_EARLY_STOPPING: dict[str, EarlyStopping] = {"false": False, "true": True, "never": "never"}
_OF_BEAMS = {"length_penalty", "early_stopping", "num_return"}
_WITH_BEAMS = {
    "plan", "target", "threads", "prompt", "prompt_file", "token_ids", "max_new_tokens", "ignore_eos", "json",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return guarded(lambda: int(options.command(options)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runtime",
        description="Generate text from a plan.",
        epilog='example: python -m runtime generate build/reference --prompt "def main():" --stream',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt. The same seed gives the same tokens with every drafter, or none (of drafters "
        "with acceptance: rejection, the same distribution).",
    )
    _add_shared(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the prompt's text")
    prompt.add_argument("--prompt-file", type=Path, help="a file with the prompt's text; - for standard input")
    prompt.add_argument("--token-ids", help="the prompt as token ids, separated by commas")
    generate.add_argument("--stream", action="store_true", help="print text as it is committed")
    generate.add_argument(
        "--json", action="store_true", help="print one JSON object: text token_ids finish_reason stats"
    )
    generate.add_argument(
        "--debug",
        action="store_true",
        help="print each round on standard error: its position, the drafted tokens with the drafter's probability that "
        "the target chooses them (dDEPTH<PARENT), + accepted, - not chosen, = the target's own token behind them; H is "
        "the entropy that chose the length; r and p/q decide by rejection. Lengths chosen and drafting that is stopped "
        "because it does not pay are told as well",
    )
    generate.add_argument("--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and the N best")
    beams = generate.add_argument_group("beam search", "A baseline that follows several continuations at once.")
    beams.add_argument("--beams", type=int, metavar="N", help="search with N beams; --json prints beams and stats")
    beams.add_argument(
        "--length-penalty", type=float, metavar="X", help="score: log-probability / tokens ** X (default 1)"
    )
    beams.add_argument(
        "--early-stopping",
        choices=_EARLY_STOPPING,
        help="once N have ended: end (true), or go on while a live beam scores better as it is (false, the "
        "default), or could at any length (never)",
    )
    beams.add_argument("--num-return", type=int, metavar="N", help="print the N best (default 1)")
    generate.set_defaults(command=_generate, parser=generate)

    chat = commands.add_parser(
        "chat", help="talk with the model", description="Talk with the model; an empty line or end of input leaves."
    )
    _add_shared(chat)
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--json", action="store_true", help="print one JSON object per reply")
    chat.set_defaults(command=_chat)
    return parser


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="folder of the plan")
    parser.add_argument("--target", help="execution target (default: the best this machine drives)")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="CPU threads of the target and of large drafters; 0 lets the backend choose",
    )
    parser.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="on a GPU, launch kernel by kernel what would be recorded at loading",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens to generate (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the most probable tokens up to p; 1 is off")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past end tokens")
    parser.add_argument(
        "--filter-order",
        choices=("temperature_first", "temperature_last"),
        default="temperature_first",
        help="temperature before top-k and top-p (default), or after them",
    )
    parser.add_argument("--stream-id", type=int, default=0, metavar="N", help="which of the seed's streams of draws")
    parser.add_argument("--drafter", metavar="NAME|none", help="drafter of the plan (default: its first)")
    parser.add_argument(
        "--keep-drafting", action="store_true", help="draft even while that costs more than it brings, by the clock"
    )
    parser.add_argument(
        "--skip-sample-adjustment",
        action="store_true",
        help="for debugging drafters with acceptance: rejection: draw a rejected token's replacement from the target's "
        "own distribution, which is wrong",
    )


def _options(arguments: argparse.Namespace) -> Options:
    options = Options(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        filter_order=arguments.filter_order,
        stream_id=arguments.stream_id,
        auto_disable=not arguments.keep_drafting,
        skip_sample_adjustment=arguments.skip_sample_adjustment,
    )
    if arguments.drafter is not None:
        options["drafter"] = arguments.drafter
    return options


def _load(arguments: argparse.Namespace) -> Runtime:
    with stderr.status(f"loading {arguments.plan}"):
        runtime = Runtime.load(
            arguments.plan,
            target=arguments.target,
            threads=arguments.threads,
            cuda_graphs=not arguments.no_cuda_graphs,
        )
    for target, reason in runtime.passed_over.items():
        stderr.print(f"runs on {runtime.target}, not on {target}: {reason}", style="dim", soft_wrap=True)
    return runtime


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.beams is not None:
        return _beam_search(arguments)
    if given := _given(arguments, _OF_BEAMS):
        raise RequestError(f"{given[0]} is an option of beam search; add --beams N, or leave it out.")
    if arguments.logprobs is not None and not arguments.json:
        raise RequestError("--logprobs are printed with --json only; add it.")
    prompt = _prompt(arguments)
    options = _options(arguments)
    options["logprobs"] = arguments.logprobs
    runtime = _load(arguments)
    if arguments.debug:
        options["on_round"] = RoundPrinter(runtime.tokenizer, stderr)
        log_to(stderr)
    stream = runtime.stream(prompt, **options)
    if arguments.stream and not arguments.json:
        for span in stream:
            print(span.text, end="", flush=True)
        print()
        stderr.print(_summary(stream.result), style="dim")
    elif arguments.json:
        print_json(generation_json(stream.result))
    else:
        print(stream.result.text)
        stderr.print(_summary(stream.result), style="dim")
    return 0


def _beam_search(arguments: argparse.Namespace) -> int:
    others = set(vars(arguments)) - _WITH_BEAMS - _OF_BEAMS - {"beams"}
    if given := _given(arguments, others):
        raise RequestError(
            f"{given[0]} cannot go with --beams: beam search draws and drafts nothing, and has no text before its end. "
            "Leave one of them out."
        )
    prompt = _prompt(arguments)
    options = BeamOptions(beams=arguments.beams, max_new_tokens=arguments.max_new_tokens)
    if arguments.length_penalty is not None:
        options["length_penalty"] = arguments.length_penalty
    if arguments.early_stopping is not None:
        options["early_stopping"] = _EARLY_STOPPING[arguments.early_stopping]
    if arguments.num_return is not None:
        options["num_return"] = arguments.num_return
    if arguments.ignore_eos:
        options["eos_token_ids"] = []
    results = _load(arguments).beam_search(prompt, **options)
    if arguments.json:
        print_json(beams_json(results))
        return 0
    for result in results:
        print(result.text)
        stderr.print(
            f"score {result.score:.4f}, {len(result.token_ids)} tokens ({result.finish_reason.value})", style="dim"
        )
    return 0


def _given(arguments: argparse.Namespace, options: set[str]) -> list[str]:
    """Those of the options that are not at their defaults, as they are spelled on the command line."""
    default = arguments.parser.get_default
    return [f"--{name.replace('_', '-')}" for name in sorted(options) if getattr(arguments, name) != default(name)]


def _prompt(arguments: argparse.Namespace) -> str | list[int]:
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.token_ids is not None:
        try:
            return [int(part) for part in arguments.token_ids.split(",")]
        except ValueError:
            raise RequestError(
                f"--token-ids is {arguments.token_ids!r}; pass whole numbers separated by commas, such as 12,7,99."
            ) from None
    try:
        if str(arguments.prompt_file) == "-":
            return sys.stdin.read()
        return str(arguments.prompt_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompt-file {arguments.prompt_file} cannot be read as UTF-8 text: {error}") from None


def _chat(arguments: argparse.Namespace) -> int:
    runtime = _load(arguments)
    session = runtime.session()
    session.stream([0], whole=True, **_options(arguments)).close()  # wrong options end the command, not a turn
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    while True:
        try:
            line = input("" if arguments.json else "> ")
        except EOFError:
            return 0
        if not line.strip():
            return 0
        messages.append({"role": "user", "content": line})
        prompt = runtime.tokenizer.encode(runtime.tokenizer.apply_chat_template(messages), add_special_tokens=False)
        try:
            stream = session.stream(prompt, whole=True, **_options(arguments))
        except RequestError as error:  # such as a turn too long: the conversation goes on without it
            report_error(error)
            messages.pop()
            continue
        if not arguments.json:
            for span in stream:
                print(span.text, end="", flush=True)
            print()
        reply = stream.result
        if arguments.json:
            print_json(generation_json(reply))
        messages.append({"role": "assistant", "content": reply.text})


def generation_json(generation: Generation) -> dict[str, object]:
    """The stable keys of `--json`."""
    value: dict[str, object] = {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason.value,
        "stats": generation.stats.to_json(),
    }
    if generation.logprobs:
        value["logprobs"] = [
            {"token_id": t.token_id, "logprob": t.logprob, "top": [list(pair) for pair in t.top]}
            for t in generation.logprobs
        ]
    return value


def beams_json(results: list[BeamResult]) -> dict[str, object]:
    """The stable keys of `--beams --json`."""
    return {
        "beams": [
            {"text": r.text, "token_ids": r.token_ids, "score": r.score, "finish_reason": r.finish_reason.value}
            for r in results
        ],
        "stats": results[0].stats.to_json(),
    }


def _summary(generation: Generation) -> str:
    stats = generation.stats
    return (
        f"{stats.new_tokens} tokens ({generation.finish_reason.value}), {stats.decode_tokens_per_second:.0f} tokens/s, "
        f"{stats.tokens_per_verify:.2f} tokens per verify, first token after {stats.ttft_ms:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
