"""A batch on actors of Ray against the same in one process: tokens a second, and whether the bytes are the same."""

from __future__ import annotations

import argparse
import filecmp
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from outrider.plans.errors import OutriderError
from outrider.plans.plan import open_plan
from outrider.plans.tokenizer import Tokenizer
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.measuring import Column, make_table, run_in_turn


def measure_batch(options: argparse.Namespace) -> dict[str, Any]:
    """Run both ways by turns, `reps` times each: a row for each way, and their ratio."""
    ways = {
        "one process": ["--threads", str(options.actors * options.cpus)],
        "actors": ["--ray", "local", "--actors", str(options.actors), "--cpus-per-actor", str(options.cpus)],
    }
    with TemporaryDirectory() as folder:
        requests = _write_requests(options, Path(folder))

        def run(way: str, _: None, turn: int) -> tuple[dict[str, Any], Path]:
            out = Path(folder) / f"{turn} {way}"
            return _run(options.plan, requests, out, ways[way]), out / "results.jsonl"

        found = run_in_turn(list(ways), [None], options.reps, run, warm_up=())
        first, *others = [path for runs in found.values() for _, path in runs]
        same = all(filecmp.cmp(first, other, shallow=False) for other in others)
    reports = {way: [report for report, _ in runs] for way, runs in found.items()}
    rows = [{"way": way, **_figures(found)} for way, found in reports.items()]
    alone, cluster = rows
    return {
        "identity": open_plan(options.plan, verify=False).manifest.identity,
        "requests": options.requests,
        "actors": options.actors,
        "cpus": options.cpus,
        "reps": options.reps,
        "rows": rows,
        "ratio": cluster["tokens_per_second"] / alone["tokens_per_second"],
        "same_bytes": same,
    }


def _figures(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = [each["tokens_per_second"] for each in found]
    return {
        "tokens_per_second": median(rates),
        "range": [min(rates), max(rates)],
        "new_tokens": found[0]["new_tokens"],
        "working_seconds": median(each["working_seconds"] for each in found),
        "seconds": median(each["seconds"] for each in found),
    }


def _write_requests(options: argparse.Namespace, folder: Path) -> Path:
    """Completions after beginnings of the held-out prompts; some begin alike, and lengths are of all sizes."""
    tokenizer = Tokenizer.load(options.plan / "tokenizer")
    manifest = open_plan(options.plan, verify=False).manifest
    held_out = [tokenizer.encode(prompt.text) for prompt in choose_prompts(options.plan, options.prompts)]
    prompts = cut_prompts(held_out, options.length, manifest.target.context - options.new)
    draw, path = random.Random(0), folder / "requests.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(options.requests):
            prompt = draw.choice(prompts)
            body = {
                "model": manifest.name,
                "prompt": prompt[: draw.randint(max(1, len(prompt) // 4), len(prompt))],
                "max_tokens": draw.randint(max(1, options.new // 4), options.new),
                "temperature": draw.choice([0, 0.7]),
                "ignore_eos": True,
            }
            asked = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(asked) + "\n")
    return path


def _run(plan: Path, requests: Path, out: Path, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "outrider.runtime", "batch", str(plan), str(requests), "--out", str(out)]
    command += ["--quiet", "--json"]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise OutriderError(f"{' '.join(command)} failed: {ended.stderr.strip()}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def print_batch(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"{report['requests']} requests; {report['actors']} actors of {report['cpus']} CPUs, and one process of as "
        f"many threads; medians of {report['reps']} runs, plan {report['identity'][:12]}"
    )
    console.print(make_table(_COLUMNS, report["rows"]))
    console.print(
        f"actors / one process: {report['ratio']:.3f}x; same bytes: {'yes' if report['same_bytes'] else 'no'}"
    )


_COLUMNS = (
    Column("way", "way", text=True),
    Column("tokens/s", "tokens_per_second", ".1f"),
    Column("range", lambda row: f"{row['range'][0]:.1f} to {row['range'][1]:.1f}"),
    Column("tokens", "new_tokens"),
    Column("working s", "working_seconds", ".1f"),
    Column("whole command s", "seconds", ".1f"),
)
