"""Plain greedy decoding against other engines: same weights, same prompt, same threads, alternating."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from compiler.checkpoint import checkpoint_hashes
from compiler.identity import digest
from compiler.recipe import source_recipe
from plans.console import progress_bar, stderr
from plans.errors import OutriderError
from runtime import Runtime
from tools.bench.prompts import choose_prompts

_REST_SECONDS = 0.3

Decode = Callable[[], tuple[list[int], float]]  # generated ids, tokens per second after the first


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One prompt, `new` tokens, `reps` runs of each engine in turn after a warm-up."""
    checkpoint = options.checkpoint or source_recipe(options.plan, option="--checkpoint FOLDER").checkpoint_path
    prompt = choose_prompts(options.plan, options.prompts)[0]
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    runtime = Runtime.load(options.plan, threads=threads)
    ids = runtime.tokenizer.encode(prompt)[:128]
    engines: dict[str, Decode] = {
        "outrider": _outrider(runtime, ids, options.new),
        "transformers": _transformers(checkpoint, ids, options.new),
    }
    if importlib.util.find_spec("onnxruntime_genai"):
        engines["onnxruntime-genai"] = _genai(checkpoint, ids, options.new, options.plan.parent, threads)
    else:
        stderr.print("onnxruntime-genai is not installed: left out (`pip install onnxruntime-genai`)")
    rates: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[int]] = {}
    with progress_bar("measuring") as progress:
        for repetition in range(options.reps):
            progress(repetition, options.reps, f"run {repetition + 1}")
            for name, decode in engines.items():
                # Thread pools of the engine before spin on for a while, and the caches hold its weights: both are
                # let go before each measured run.
                sleep(_REST_SECONDS)
                decode()
                tokens[name], rate = decode()
                rates[name].append(rate)
    ours = rates["outrider"]
    return {
        "plan": str(options.plan),
        "threads": threads,
        "prompt_tokens": len(ids),
        "new_tokens": options.new,
        "reps": options.reps,
        "engines": {
            name: {
                "tokens_per_second": median(r),
                "ratio": median(a / b for a, b in zip(ours, r, strict=True)),
                "same_tokens": tokens[name] == tokens["outrider"],
            }
            for name, r in rates.items()
        },
    }


def _outrider(runtime: Runtime, ids: list[int], new: int) -> Decode:
    def decode() -> tuple[list[int], float]:
        g = runtime.generate(ids, drafter="none", max_new_tokens=new, ignore_eos=True)
        return g.token_ids, g.stats.decode_tokens_per_second

    return decode


def _transformers(checkpoint: Path, ids: list[int], new: int) -> Decode:
    transformers_logging.disable_progress_bar()  # ours is the one on the terminal
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = torch.tensor([ids])

    @torch.inference_mode()
    def decode() -> tuple[list[int], float]:
        """The bare loop with its own cache: `generate` would add its bookkeeping to every token."""
        out = model(prompt, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        found, started = [int(token)], perf_counter()
        for _ in range(new - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            found.append(int(token))
        return found, (new - 1) / (perf_counter() - started)

    return decode


def _genai(checkpoint: Path, ids: list[int], new: int, work: Path, threads: int) -> Decode:
    """fp32 on the CPU, converted by the package's own builder."""
    import onnxruntime_genai as genai

    folder = convert_for_genai(checkpoint, work)
    config = genai.Config(str(folder))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
    model = genai.Model(config)

    def decode() -> tuple[list[int], float]:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + new, min_length=len(ids) + new)
        generator = genai.Generator(model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        started = perf_counter()
        for _ in range(new - 1):
            generator.generate_next_token()
        seconds = perf_counter() - started
        return [int(t) for t in generator.get_sequence(0)][len(ids) :], (new - 1) / seconds

    return decode


def convert_for_genai(checkpoint: Path, work: Path) -> Path:
    """The checkpoint in onnxruntime-genai's own format; kept in `work` under the hash of the checkpoint's files.

    Raises `OutriderError` with the builder's last words where it fails.
    """
    folder = work / f"genai-fp32-{digest(checkpoint_hashes(checkpoint))[:12]}"
    if folder.is_dir():
        return folder
    unfinished = work / f".{folder.name}.building"
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(unfinished)]
    with stderr.status("converting the checkpoint with onnxruntime-genai's builder"):
        ended = subprocess.run([*command, "-p", "fp32", "-e", "cpu"], capture_output=True, text=True, errors="replace")
    if ended.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        said = ended.stderr.strip().splitlines() or ["it said nothing"]
        raise OutriderError(
            f"onnxruntime-genai's builder cannot convert {checkpoint} ({said[-1].strip()}); "
            "uninstall onnxruntime-genai to measure without it"
        )
    unfinished.rename(folder)
    return folder


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {report['threads']} threads; {report['prompt_tokens']} prompt tokens, "
        f"{report['new_tokens']} new, {report['reps']} runs, engines alternating"
    )
    table = Table("engine", box=None, pad_edge=False)
    for column in ("tokens/s", "outrider is"):
        table.add_column(column, justify="right")
    table.add_column("same tokens")
    for name, engine in report["engines"].items():
        same = "yes" if engine["same_tokens"] else "no"
        table.add_row(name, f"{engine['tokens_per_second']:.0f}", f"{engine['ratio']:.2f}x", same)
    console.print(table)
