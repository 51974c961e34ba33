"""What this machine's GPU shows: `python -m tools.gpu_report [--out tools/results] [--shapes 1b,8b]`.

In order: the tests marked `gpu`; the speed of copies on the device; the reference plan on every target that runs here,
its tokens against the CPU's, plain decoding and every drafter; plain decoding of random Llama-shaped models in
bfloat16, whose share of the copy speed says how near it comes to reading the weights once a token. Writes one JSON and
one Markdown file, with date, machine and command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from compiler.build import build
from compiler.held_out import read_prompts
from compiler.recipe import load_recipe
from plans.console import stdout
from plans.errors import OutriderError
from runtime import Runtime
from runtime.backends.cuda_driver import CudaDevice, architecture, call, driver
from runtime.request import Options

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "plans" / "recipes" / "reference.yaml"
TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt-rtx", "tensorrt")
_COPY = 1 << 30  # bytes
_COPIES = 20


@dataclass(frozen=True)
class Shape:
    """A Llama of random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int


SHAPES = {
    "1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=128256),
    "8b": Shape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
}


def device_name() -> str:
    name = call("cuDeviceGetName", 256, call("cuDeviceGet", 0))
    return str(name.split(b"\0")[0].decode()) if isinstance(name, bytes) else str(name)


def run_tests() -> dict[str, Any]:
    """`pytest -m gpu`: its last line, and its exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return {"status": done.returncode, "summary": lines[-1] if lines else "", "failed": _failures(lines)}


def _failures(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("FAILED", "ERROR"))]


def copy_speed() -> float:
    """GB/s of copies on the device, read and written bytes counted both."""
    device = CudaDevice()
    source, to = device.allocate(_COPY), device.allocate(_COPY)
    device.copy(to, source, _COPY)
    device.wait()
    started = perf_counter()
    for _ in range(_COPIES):
        device.copy(to, source, _COPY)
    device.wait()
    seconds = perf_counter() - started
    for address in (source, to):
        device.free(address)
    return 2 * _COPY * _COPIES / seconds / 1e9


def reference_rows(folder: Path, prompts: int, new: int) -> list[dict[str, Any]]:
    """The reference plan: every target and drafter, tokens against plain decoding on the first, the CPU."""
    recipe = load_recipe(RECIPE)
    assert recipe.held_out_path is not None
    texts = read_prompts(recipe.held_out_path)[:prompts]
    options = Options(max_new_tokens=new, ignore_eos=True, auto_disable=False)
    expected: list[list[int]] = []
    rows = []
    for target in TARGETS:
        plan = folder / target
        try:
            build(recipe.for_targets([target]), RECIPE, plan)
            runtime = Runtime.load(plan, target=target)
        except OutriderError as error:
            rows.append({"target": target, "error": str(error)})
            continue
        expected = expected or [runtime.generate(text, drafter="none", **options).token_ids for text in texts]
        for drafter in ("none", *(d.name for d in runtime.manifest.drafters)):
            session = runtime.session()
            session.generate(texts[0], drafter=drafter, **options)
            runs = []
            for text in texts:
                session.reset()
                runs.append(session.generate(text, drafter=drafter, **options))
            steady = [run.stats for run in runs]
            rows.append(
                {
                    "target": target,
                    "drafter": drafter,
                    "tokens_per_second": median(s.decode_tokens_per_second for s in steady),
                    "tokens_per_verify": sum(s.new_tokens for s in steady) / sum(s.rounds for s in steady),
                    "round_ms": median(s.total_ms / s.rounds for s in steady),
                    "stage_ms": {k: v / steady[-1].rounds for k, v in steady[-1].stage_ms.items() if v},
                    "same_runs": sum(a.token_ids == b for a, b in zip(runs, expected, strict=True)),
                    "runs": len(runs),
                }
            )
    return rows


def write_random_llama(shape: Shape, folder: Path) -> int:
    """A checkpoint of random weights in bfloat16; bytes of its weights that a token reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    read = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    (folder / "tokenizer.json").write_bytes(
        (RECIPE.parent.parent / "reference" / "target" / "tokenizer.json").read_bytes()
    )
    return 2 * read


def shape_row(name: str, folder: Path, copies: float, new: int) -> dict[str, Any]:
    """Plain decoding of a random model at batch 1, and its share of the copy speed."""
    checkpoint, plan = folder / name, folder / f"{name}-plan"
    weights = write_random_llama(SHAPES[name], checkpoint)
    recipe_path = folder / f"{name}.yaml"
    own = architecture()
    recipe_path.write_text(
        f"name: random-{name}\ntarget: {{checkpoint: {checkpoint}, dtype: bfloat16}}\ncapacity: {{context: 2048}}\n"
        f"targets: [{{kind: onnxruntime-cuda, compute_capabilities: [{own}]}}]\n"
    )
    started = perf_counter()
    build(load_recipe(recipe_path), recipe_path, plan)
    built = perf_counter() - started
    runtime = Runtime.load(plan, verify=False)
    session = runtime.session()
    prompt = [(37 * i) % 1000 + 1 for i in range(128)]
    options = Options(max_new_tokens=new, ignore_eos=True, drafter="none")
    session.generate(prompt, **options)
    session.reset()
    stats = session.generate(prompt, **options).stats
    rate = stats.decode_tokens_per_second
    read = weights * rate / 1e9
    return {
        "model": name,
        "weights_gb": weights / 1e9,
        "build_seconds": built,
        "tokens_per_second": rate,
        "ttft_ms": stats.ttft_ms,
        "read_gb_per_second": read,
        "share_of_copy_read": read / (copies / 2),
        "stage_ms": {k: v / stats.rounds for k, v in stats.stage_ms.items() if v},
    }


def markdown(report: dict[str, Any]) -> str:
    tests = report["tests"]
    lines = [
        f"# {report['gpu']}, {report['date']}",
        "",
        f"    {report['command']}",
        "",
        f"- driver {report['driver']}, {report['architecture']}; copies on the device {report['copy_gb_s']:.0f} GB/s",
        f"- tests marked gpu: {tests['summary'] if isinstance(tests, dict) else tests[0]['error']}",
        "",
    ]
    lines += _table(
        ("target", "drafter", "tokens/s", "tokens/verify", "round ms", "same runs"),
        "{target}|{drafter}|{tokens_per_second:.0f}|{tokens_per_verify:.2f}|{round_ms:.3f}|{same_runs} of {runs}",
        report["reference"],
    )
    lines += _table(
        ("model", "weights GB", "tokens/s", "read GB/s", "of a copy's reading", "ttft ms"),
        "{model}|{weights_gb:.2f}|{tokens_per_second:.1f}|{read_gb_per_second:.0f}|{share_of_copy_read:.0%}|{ttft_ms:.0f}",
        report["shapes"],
    )
    return "\n".join(lines)


def _table(columns: tuple[str, ...], row: str, rows: list[dict[str, Any]]) -> list[str]:
    """Markdown; a row with an `error` says that alone."""
    cells = [
        [str(found[columns[0]]), found["error"]] if "error" in found else row.format_map(found).split("|")
        for found in rows
    ]
    filled = [line + [""] * (len(columns) - len(line)) for line in cells]
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *filled)] + [""]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "results", help="folder of the two files")
    parser.add_argument("--shapes", default="1b", help=f"of {', '.join(SHAPES)}, with commas; empty for none")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts on the reference plan (default 8)")
    parser.add_argument("--new", type=int, default=128, help="tokens of each run (default 128)")
    arguments = parser.parse_args(given)
    try:
        driver()
    except OutriderError as error:
        print(f"no report: {error}", file=sys.stderr)
        sys.exit(2)
    report: dict[str, Any] = {
        "date": str(date.today()),
        "command": "python -m tools.gpu_report " + " ".join(sys.argv[1:] if given is None else given),
        "gpu": device_name(),
        "architecture": architecture(),
        "driver": call("cuDriverGetVersion"),
        "shapes": [],
        "reference": [],
        "tests": {"summary": "not run"},
        "copy_gb_s": 0.0,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"gpu-{report['date']}-{report['architecture']}"

    def save(step: str, take: Callable[[], Any]) -> None:
        """Every step is kept as soon as it is there: a machine may be taken back."""
        stdout.print(f"{step} ...")
        try:
            report[step] = take()
        except Exception as error:  # a step that fails is part of the report
            report[step] = [{"model": step, "target": step, "error": f"{type(error).__name__}: {error}"}]
        path.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")

    save("copy_gb_s", copy_speed)
    save("tests", run_tests)
    with TemporaryDirectory(prefix="outrider-gpu-") as folder:
        save("reference", lambda: reference_rows(Path(folder), arguments.prompts, arguments.new))
        names = [name for name in arguments.shapes.split(",") if name]
        save("shapes", lambda: [shape_row(n, Path(folder), report["copy_gb_s"], arguments.new) for n in names])
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    stdout.print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
