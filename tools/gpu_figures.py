"""What `tools.gpu_report` measures: copies on the device, the reference plan, models of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from compiler.build import build
from compiler.held_out import read_prompts
from compiler.recipe import load_recipe
from plans import names
from plans.errors import OutriderError
from plans.manifest import Program, StageKind
from runtime import Runtime, Session
from runtime.backends.cuda_driver import CudaDevice, architecture
from runtime.backends.device import DeviceBuffers
from runtime.backends.device_contract import Device
from runtime.request import Options
from runtime.stats import Stats
from tools.verify.agreement import find_parting

RECIPE = Path(__file__).resolve().parent.parent / "plans" / "recipes" / "reference.yaml"
CPU = "onnxruntime-cpu"
GPU_BACKENDS = ("cuda", "onnxruntime-cuda", "tensorrt-rtx", "tensorrt")
_COPY, _COPIES = 1 << 30, 20  # bytes, and how often
_LAUNCHES = 200  # of an op, for its time
_CHAINS = (0, 1, 3, 7, 15, 31, 63)  # drafted tokens behind the tip
_NUMBERS = (1 << 24) + 43  # random ones of a checkpoint; odd, so that its matrices differ
_WARM_ROUNDS = 2  # the first computes the prompt, and may be plain for that

WEIGHTS = {"bfloat16": (16, 16), "float16": (16, 16), "int8": (8.5, 8.5), "int4": (4.5, 8.5)}
"""Bits of a weight of the layers, and of one of the head, with its part of a scale that 32 share."""


@dataclass(frozen=True)
class Shape:
    """A Llama of random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    def read_bytes(self, weights: str) -> int:
        """Bytes of the weights that a token reads, of one of `WEIGHTS`: all but the embedding."""
        kv, (of_layers, of_head) = self.hidden // self.heads * self.kv_heads, WEIGHTS[weights]
        layer = 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate
        norms = (2 * self.layers + 1) * self.hidden
        return int(self.layers * layer * of_layers + self.hidden * self.vocab * of_head) // 8 + 2 * norms


SHAPES = {
    "1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=128256),
    "8b": Shape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
}


def copy_speed() -> float:
    """GB/s of copies on the device, read and written bytes counted both."""
    device = CudaDevice()
    source, to = device.allocate(_COPY), device.allocate(_COPY)
    for copies in (1, _COPIES):
        started = perf_counter()
        with device.lock():
            for _ in range(copies):
                device.copy(to, source, _COPY)
        device.wait()
        seconds = perf_counter() - started
    for address in (source, to):
        device.free(address)
    return 2 * _COPY * _COPIES / seconds / 1e9


def decode(session: Session, prompt: str | list[int], drafter: str, new: int) -> tuple[dict[str, Any], list[int]]:
    """Figures of the rounds behind the first two, by wall clock, and all tokens.

    `device_ms` is a round's time on the device's own clock, from the first copy there until its end: what is left of a
    round is the host's alone, `host_ms`. On the CPU that is what lies outside of engine calls.
    """
    options = Options(max_new_tokens=new, ignore_eos=True, auto_disable=False, drafter=drafter)
    session.reset()
    tokens: list[int] = []
    began = perf_counter()
    with closing(session.stream(prompt, **options)) as stream:
        for _ in range(_WARM_ROUNDS):
            tokens += next(stream).token_ids
        opening, clock, before = perf_counter() - began, session.stage_clock(), len(tokens)
        rounds = 0
        with device_clock(session) as on_device:
            started = perf_counter()
            for span in stream:
                tokens += span.token_ids
                rounds += bool(span.token_ids)
            seconds = perf_counter() - started
    stats = Stats()
    clock.fill(stats)
    rounds = max(rounds, 1)
    stages = {name: ms / rounds for name, ms in stats.stage_ms.items() if ms}
    round_ms, device_ms = 1000 * seconds / rounds, sum(on_device) / rounds
    return {
        "tokens_per_second": (len(tokens) - before) / seconds,
        "tokens_per_verify": (len(tokens) - before) / rounds,
        "round_ms": round_ms,
        "device_ms": device_ms,
        "host_ms": round_ms - (device_ms or stats.engine_ms / rounds),
        "opening_ms": 1000 * opening,
        "stage_ms": stages,
    }, tokens


@contextmanager
def device_clock(session: Session) -> Iterator[list[float]]:
    """Milliseconds on the device of every program that runs meanwhile, known at the end; none without a GPU."""
    times: list[float] = []
    device = getattr(session.buffers, "device", None)
    if not isinstance(device, CudaDevice):
        yield times
        return
    marks: list[tuple[Any, Any]] = []

    def timed(enqueue: Callable[..., object]) -> Callable[..., object]:
        def both(*arguments: object) -> object:
            begun = device.timed_mark()
            found = enqueue(*arguments)
            marks.append((begun, device.timed_mark()))
            return found

        return both

    with ExitStack() as stack:
        for program in session.programs.values():
            enqueue = "launch" if program.launches else "run"  # what may be launched is, also by `run`
            stack.enter_context(patch.object(program, enqueue, timed(getattr(program, enqueue))))
        yield times
    times += [device.milliseconds(*pair) for pair in marks]


def op_times(session: Session, device: Device, program: str, stages: Program) -> dict[str, float]:
    """Milliseconds of each of a program's ops, launched over and over on what the last round left, by name."""
    times: dict[str, float] = {}
    for stage, call in zip(stages.stages, session.programs[program].calls, strict=True):
        if stage.kind is StageKind.OP:
            for launches in (1, _LAUNCHES):
                started = perf_counter()
                with device.lock():
                    for _ in range(launches):
                        call()
                    done = device.mark()
                device.wait_for(done)
                elapsed = perf_counter() - started
            times[stage.run] = times.get(stage.run, 0.0) + 1000 * elapsed / _LAUNCHES
    return times


def launches(session: Session, program: str) -> int:
    """What the host enqueues for a recorded round: stretches that are one graph, and engines that are one each."""
    return len([name for name in session.programs[program].stage_names if name not in ("prepare", "sent", "wait")])


def verify_times(session: Session, chains: Iterable[int], repeats: int = 9) -> dict[int, float]:
    """Milliseconds of the target's part of a round, by tokens: the tip and a chain behind it."""
    drafter = next(d.name for d in session.manifest.drafters if d.kind == "ngram")
    times = {}
    for length in chains:
        with suppress(OutriderError):  # the plan's drafts are shorter
            runs = [session.time_round([0] * length, drafter if length else "none") for _ in range(1 + repeats)]
            times[1 + length] = median(runs[1:])
    return times


def plan_rows(
    runtime: Runtime, graphs: bool, prompts: list[list[int]], new: int, expected: list[list[int]], judge: Session
) -> Iterator[dict[str, Any]]:
    """A row for every drafter: medians over the prompts, tokens against `expected`, which `judge` decodes plainly, and
    against the runtime's own plain decoding."""
    options = Options(max_new_tokens=new, ignore_eos=True, temperature=0.0)
    own = list[list[int]]()
    for drafter in ("none", *(d.name for d in runtime.manifest.drafters)):
        session = runtime.session()
        decode(session, prompts[0], drafter, new)
        runs = [decode(session, ids, drafter, new) for ids in prompts]
        partings = [
            find_parting(judge, ids, options, plain, found)
            for ids, plain, (_, found) in zip(prompts, expected, runs, strict=True)
        ]
        row: dict[str, Any] = {"backend": runtime.backend, "cuda_graphs": graphs, "drafter": drafter}
        for figure in ("tokens_per_second", "tokens_per_verify", "round_ms", "device_ms", "host_ms", "opening_ms"):
            row[figure] = median(figures[figure] for figures, _ in runs)
        row["stage_ms"] = runs[-1][0]["stage_ms"]
        buffers = session.buffers
        if isinstance(buffers, DeviceBuffers):
            fused = names.speculate(drafter)
            program = names.DECODE if drafter == "none" else fused if fused in session.programs else names.VERIFY
            stages = runtime.manifest.backends[runtime.backend].programs[program]
            row["op_ms"] = op_times(session, buffers.device, program, stages)
            row["ops_share"] = sum(row["op_ms"].values()) / row["round_ms"]
            if graphs:
                row["launches"] = launches(session, program)
        found = [tokens for _, tokens in runs]
        own = own or found
        row["runs"], row["same_runs"] = len(runs), partings.count(None)
        row["as_plain"] = sum(tokens == plain for tokens, plain in zip(found, own, strict=True))
        row["partings"] = [{"index": p[0], "margin": p[1]} for p in partings if p is not None]
        yield row


def reference_on_cpu(folder: Path, prompts: int, new: int) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Rows of the reference plan on the CPU, and the tokens of its plain decoding, by prompt."""
    cpu, ids = _reference(folder, CPU, False), _reference_prompts(folder, prompts)
    options = Options(max_new_tokens=new, ignore_eos=True, drafter="none")
    expected = [cpu.generate(prompt, **options).token_ids for prompt in ids]
    return list(plan_rows(cpu, False, ids, new, expected, cpu.session())), expected


def reference_rows(
    folder: Path, backend: str, graphs: bool, prompts: int, new: int, expected: list[list[int]]
) -> list[dict[str, Any]]:
    """Rows of the reference plan on a backend of a GPU; tokens against those `expected`."""
    runtime, judge = _reference(folder, backend, graphs), _reference(folder, CPU, False).session()
    return list(plan_rows(runtime, graphs, _reference_prompts(folder, prompts), new, expected, judge))


def build_reference(folder: Path, backend: str) -> None:
    """Build the reference plan for one backend, in `folder` under the backend's name; `cuda` in bfloat16, as its
    float32 is for tests."""
    halves = f"backends=[{{kind: cuda, dtype: bfloat16, compute_capabilities: [{architecture()}]}}]"
    recipe = load_recipe(RECIPE, [halves] if backend == "cuda" else [])
    build(recipe.for_backends([backend]), RECIPE, folder / backend)


def _reference(folder: Path, backend: str, graphs: bool) -> Runtime:
    return Runtime.load(folder / backend, backend=backend, cuda_graphs=graphs)


def _reference_prompts(folder: Path, count: int) -> list[list[int]]:
    held_out = load_recipe(RECIPE).held_out_path
    assert held_out is not None
    tokenizer = _reference(folder, CPU, False).tokenizer
    return [tokenizer.encode(text) for text in read_prompts(held_out)[:count]]


def write_random_llama(shape: Shape, folder: Path) -> None:
    """Write a checkpoint of random weights in bfloat16: stretches of a few million random numbers, over and over."""
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
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.bfloat16().to_empty(device="cpu")
    numbers, at = (0.02 * torch.randn(_NUMBERS)).bfloat16(), 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
                continue
            flat = parameter.reshape(-1)
            for start in range(0, len(flat), _NUMBERS):
                part = flat[start : start + _NUMBERS]
                part.copy_(numbers.roll(-at)[: len(part)])
            at = (at + len(flat)) % _NUMBERS
    model.save_pretrained(folder)
    tokenizer = RECIPE.parent.parent / "reference" / "target" / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def build_shape(checkpoint: Path, backend: str, weights: str, plan: Path) -> None:
    """Build the plan of a random model for one backend of this GPU; integers stand among bfloat16."""
    recipe = plan.with_suffix(".yaml")
    types = f"dtype: bfloat16, weights: {{type: {weights}}}" if weights.startswith("int") else f"dtype: {weights}"
    recipe.write_text(
        f"name: random-{checkpoint.name}\ntarget: {{checkpoint: {checkpoint}, {types}}}\n"
        f"drafters: [{{name: ngram, kind: ngram, max_draft: {_CHAINS[-1]}}}]\ncapacity: {{context: 2048}}\n"
        f"backends: [{{kind: {backend}, compute_capabilities: [{architecture()}]}}]\n"
    )
    build(load_recipe(recipe), recipe, plan)


def shape_figures(plan: Path, weights: int, copies: float, new: int, graphs: bool) -> dict[str, Any]:
    """The figures of one plan of random weights, `weights` bytes of which a token reads, at batch 1: plain decoding and
    its share of the copy speed, speculation with n-grams, and what a round over more tokens costs."""
    started = perf_counter()
    runtime = Runtime.load(plan, verify=False, cuda_graphs=graphs)
    loaded = perf_counter() - started
    session = runtime.session()
    assert isinstance(session.buffers, DeviceBuffers), "this is a backend of a GPU"
    prompt = [(37 * i) % 1000 + 1 for i in range(128)]
    ngram, _ = decode(session, prompt, "ngram", new)
    speculate = names.VERIFY
    ops = op_times(
        session, session.buffers.device, speculate, runtime.manifest.backends[runtime.backend].programs[speculate]
    )
    plain = sorted((decode(session, prompt, "none", new)[0] for _ in range(3)), key=lambda row: row["round_ms"])[1]
    read = weights * plain["tokens_per_second"] / 1e9
    return {
        "load_seconds": loaded,
        **plain,
        "host_share": plain["host_ms"] / plain["round_ms"],
        "read_gb_per_second": read,
        "share_of_copy": read / copies,
        "verify_ms": verify_times(session, _CHAINS),
        "op_ms": ops,
        "ops_share": sum(ops.values()) / ngram["round_ms"],
        "launches": launches(session, names.DECODE) if graphs else None,
        "ngram": ngram,
    }
