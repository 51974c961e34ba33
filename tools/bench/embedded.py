"""From C against from Python: the same plain generations in fresh processes, one after another."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from plans.console import progress_bar
from plans.errors import OutriderError
from plans.plan import read_manifest
from runtime.backends import choose_target
from runtime.embed.build import build
from runtime.tokenizer import Tokenizer
from tools.bench.prompts import choose_prompts, encode_prompts
from tools.bench.threads import threads_used

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SOURCE = Path(__file__).resolve().parent / "embedded.c"
_PYTHON = """
import sys, time
from runtime import Runtime
plan, prompt, new, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
session = Runtime.load(plan).session()
for run in range(runs + 1):
    session.reset()
    tokens, started = 0, time.perf_counter()
    stream = session.stream(prompt, max_new_tokens=new, ignore_eos=True, drafter="none")
    for span in stream:
        tokens += len(span.token_ids)
    stream.result
    if run:
        print(1000 * (time.perf_counter() - started) / tokens)
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over `reps` pairs of processes of `runs` generations each; the ratio is that of pairs.

    Raises `RequestError` for a prompt that leaves no room for as many tokens as asked for.
    """
    manifest = read_manifest(options.plan)
    first = choose_prompts(options.plan, options.prompts)[:1]
    tokenizer = Tokenizer.load(options.plan / "tokenizer")
    prompts = encode_prompts(first, tokenizer, manifest.target.context, options.new)
    arguments = [str(options.plan.resolve()), first[0].text, str(options.new), str(options.runs)]
    with TemporaryDirectory(prefix="outrider-embedded-") as folder:
        program = _compile(Path(folder))
        commands = {"c": [str(program), *arguments], "python": [sys.executable, "-c", _PYTHON, *arguments]}
        found: dict[str, list[float]] = {name: [] for name in commands}
        with progress_bar("measuring") as progress:
            for repetition in range(options.reps):
                order = list(commands) if repetition % 2 else list(reversed(commands))
                for place, name in enumerate(order):
                    progress(2 * repetition + place, 2 * options.reps, f"pair {repetition + 1}, {name}")
                    found[name].append(_run(commands[name]))
    ratios = [c / python for c, python in zip(found["c"], found["python"], strict=True)]
    return {
        "plan": str(options.plan),
        "identity": manifest.identity,
        "threads": threads_used(choose_target(manifest.targets, None).target, 0),
        "prompts_sha256": prompts.sha256,
        "prompt_tokens": len(prompts.ids[0]),
        "new_tokens": options.new,
        "reps": options.reps,
        "runs": options.runs,
        "ms_per_token": {name: median(values) for name, values in found.items()},
        "ratio": median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


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


def _run(command: list[str]) -> float:
    """Milliseconds a token, the median of a process's generations."""
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise OutriderError(f"{Path(command[0]).name} fails: {said[-1]}")
    return median(float(line) for line in done.stdout.split())


def print_table(report: dict[str, Any], console: Console) -> None:
    machine, ms = report["machine"], report["ms_per_token"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores; plan {report['identity'][:12]}, plain greedy decoding, "
        f"a prompt of {report['prompt_tokens']} tokens, {report['new_tokens']} new ones, "
        f"{report['reps']} pairs of processes of {report['runs']} generations"
    )
    console.print(
        f"from C {ms['c']:.3f} ms a token, from Python {ms['python']:.3f} ms: C takes {report['ratio']:.3f} of "
        f"Python's time ({report['ratio_lowest']:.3f} to {report['ratio_highest']:.3f})"
    )
