"""From C against from Python: the same plain generations in two processes, in turn."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any, Self

from rich.console import Console

from outrider.commands.arguments import Parser, at_least_1
from outrider.plans.errors import OutriderError
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends import choose_backend
from outrider.runtime.embed.build import build
from outrider.tools.bench.prompts import choose_prompts, encode_prompts
from outrider.tools.identity import threads_used
from outrider.tools.lab.child import Child, ChildError
from outrider.tools.measuring import add_arguments, measuring, paired_ratios, run_in_turn, run_tool, spread

SOURCE = Path(__file__).resolve().parent / "embedded.c"
_PYTHON = """
import sys, time
from outrider import Runtime
plan, prompt, new = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = Runtime.load(plan).session()
print("ready", flush=True)
for line in sys.stdin:
    session.reset()
    tokens, started = 0, time.perf_counter()
    stream = session.stream(prompt, max_new_tokens=new, ignore_eos=True, drafter="none")
    for span in stream:
        tokens += len(span.token_ids)
    stream.result
    print(1000 * (time.perf_counter() - started) / tokens, flush=True)
"""
_PATIENCE_SECONDS = 30.0  # for a process to end
_REST_SECONDS = 0.03  # between generations: the other's threads have stopped spinning


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over `reps` pairs of processes that generate in turn, `runs` times each after one that warms up.

    The ratio is that of neighbours, so that a machine whose speed changes slows both. Raises `RequestError` for a
    prompt that leaves no room for as many tokens as asked for.
    """
    manifest = read_manifest(options.plan)
    first = choose_prompts(options.plan, options.prompts)[:1]
    tokenizer = Tokenizer.load(options.plan / "tokenizer")
    prompts = encode_prompts(first, tokenizer, manifest.target.context, options.new)
    arguments = [str(options.plan.resolve()), first[0].text, str(options.new)]
    found: dict[str, list[float]] = {"c": [], "python": []}
    with TemporaryDirectory(prefix="outrider-embedded-") as folder:
        program = _compile(Path(folder))
        commands = {"c": [str(program), *arguments], "python": [sys.executable, "-c", _PYTHON, *arguments]}
        with measuring([1.0] * options.reps * (options.runs + 1) * len(commands)) as begin:
            for _ in range(options.reps):
                with ExitStack() as stack:
                    processes = {name: stack.enter_context(_Process(command)) for name, command in commands.items()}

                    def run(name: str, *_: object, processes: dict[str, _Process] = processes) -> float:
                        sleep(_REST_SECONDS)
                        return processes[name].generate()

                    times = run_in_turn(list(commands), [None], options.runs, run, begin=begin)
                    found = {name: [*found[name], *times[name]] for name in commands}
    return {
        "plan": str(options.plan),
        "identity": manifest.identity,
        "threads": threads_used(choose_backend(manifest.backends, None).backend, 0),
        "prompts_sha256": prompts.sha256,
        "prompt_tokens": len(prompts.ids[0]),
        "new_tokens": options.new,
        "reps": options.reps,
        "runs": options.runs,
        "ms_per_token": {name: median(values) for name, values in found.items()},
        **spread("ratio", paired_ratios(found["c"], found["python"])),
    }


class _Process(Child):
    """One that generates when it is asked to. Raises `OutriderError` for one that fails."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command)
        self._name = Path(command[0]).name

    def __enter__(self) -> Self:
        try:
            if (line := self._heard(self.answer)) != "ready":
                raise self._fault(f"it says {line!r} where it should be ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close its input, and wait for its end; raise where its status is not 0."""
        try:
            if kind is None and (status := self.end(_PATIENCE_SECONDS)) != 0:
                raise self._fault("it does not end" if status is None else f"exit status {status}")
        finally:
            self.close()

    def generate(self) -> float:
        """Milliseconds a token."""
        line = self._heard(self.ask)
        try:
            return float(line)
        except ValueError:
            raise self._fault(f"it says {line!r} in place of a time") from None

    def _heard(self, ask: Callable[[], str]) -> str:
        try:
            return ask()
        except ChildError as error:
            raise OutriderError(f"{self._name} fails: {error}") from None

    def _fault(self, otherwise: str) -> OutriderError:
        return OutriderError(f"{self._name} fails: {self.last_words(otherwise)}")


def _compile(folder: Path) -> Path:
    build(folder)
    program = folder / "embedded"
    lib = folder / "lib"
    command = [
        "cc", "-O2", "-std=c11", "-D_POSIX_C_SOURCE=200809L", f"-I{folder / 'include'}", str(SOURCE), "-o",
        str(program), f"-L{lib}", "-loutrider", f"-Wl,-rpath,{lib}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OutriderError(f"{SOURCE.name} cannot be compiled: {done.stderr.strip()[-1000:]}")
    return program


def print_table(report: dict[str, Any], console: Console) -> None:
    machine, ms = report["machine"], report["ms_per_token"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores; plan {report['identity'][:12]}, plain greedy decoding, "
        f"a prompt of {report['prompt_tokens']} tokens, {report['new_tokens']} new ones, "
        f"{report['reps']} pairs of processes, {report['runs']} generations each, in turn"
    )
    console.print(
        f"from C {ms['c']:.3f} ms a token, from Python {ms['python']:.3f} ms: C takes {report['ratio']:.3f} of "
        f"Python's time (p10-p90 {report['ratio_p10']:.3f} to {report['ratio_p90']:.3f})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement."""
    return run_tool(_parser, arguments, measure, print_table)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.embedded",
        description="Compile a C program against the library, and run it and a Python program that does the same in "
        "turn, a generation each: plain greedy decoding of a held-out prompt, milliseconds a token.",
        epilog="example: %(prog)s build/reference --runs 10",
    )
    add_arguments(parser, "plan prompts new json", new=256)
    parser.add_argument("--reps", type=at_least_1, default=4, help="pairs of processes (default 4)")
    parser.add_argument("--runs", type=at_least_1, default=30, help="generations of each process (default 30)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
