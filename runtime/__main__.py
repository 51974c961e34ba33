"""`python -m runtime generate | chat`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plans.console import guarded, print_json, report_error, stderr
from plans.errors import RequestError
from runtime.generation import Generation
from runtime.request import Options
from runtime.runtime import Runtime


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
        description="Continue a prompt. The same seed gives the same tokens with every drafter, or none.",
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
    generate.add_argument("--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and the N best")
    generate.set_defaults(command=_generate)

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
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets the backend choose")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens to generate (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the most probable tokens up to p; 1 is off")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past end tokens")
    parser.add_argument("--drafter", metavar="NAME|none", help="drafter of the plan (default: its first)")


def _options(arguments: argparse.Namespace) -> Options:
    options = Options(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
    )
    if arguments.drafter is not None:
        options["drafter"] = arguments.drafter
    return options


def _load(arguments: argparse.Namespace) -> Runtime:
    with stderr.status(f"loading {arguments.plan}"):
        return Runtime.load(arguments.plan, target=arguments.target, threads=arguments.threads)


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.logprobs is not None and not arguments.json:
        raise RequestError("--logprobs are printed with --json only; add it.")
    prompt = _prompt(arguments)
    options = _options(arguments)
    options["logprobs"] = arguments.logprobs
    stream = _load(arguments).stream(prompt, **options)
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


def _summary(generation: Generation) -> str:
    stats = generation.stats
    return (
        f"{stats.new_tokens} tokens ({generation.finish_reason.value}), {stats.decode_tokens_per_second:.0f} tokens/s, "
        f"{stats.tokens_per_verify:.2f} tokens per verify, first token after {stats.ttft_ms:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
