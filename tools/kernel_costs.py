"""What the target's engine of the backend `cuda` moves and launches in a step: `python -m tools.kernel_costs`.

Models of the shapes of `tools.gpu_report` are exported and lowered as for a plan, without their weights, which nothing
reads here. Ops around the engine are left out: a plain step also launches set_numbers, take_tokens, bim_mask, sample
and keep_tokens. The times are computed, not measured: the bytes at the speed of copies, and for each launch the pause
that others have measured between two kernels of one CUDA graph. A GPU reaches neither exactly. Attention's own time is
not modelled: keys are counted once, and its kernel reads them again for each token, so that behind long contexts a step
takes longer than this says. With `--architecture` the kernels are compiled, and a second table says what each takes of
a multiprocessor, and how many of its blocks run there.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import json
import struct
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commands.arguments import Parser
from commands.console import guarded, stdout
from compiler.checkpoint import defer_decoder
from compiler.export import export_target
from compiler.kernels import HANDLERS
from compiler.kernels.emitter import Emitter
from compiler.lowering import lower
from compiler.quantization.graph import quantize
from compiler.quantization.weight_form import WeightForm
from plans import names
from plans.formulas import formula
from plans.kernel_costs import LaunchCost, launch_costs
from plans.kernel_engine import KernelEngine
from plugins.cuda.compile import compile_kernels
from plugins.cuda.resources import MULTIPROCESSORS, kernel_resources
from tools.gpu_figures import SHAPES, Shape

GAP = 1.3e-6
"""Seconds between two kernels of one CUDA graph on an H100, as the authors of a megakernel for Llama-1B measured it
(hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles)."""

GPUS = {"H200": 4263e9, "RTX 4090": 0.92 * 1008e9}
"""Bytes a second that copies move: measured on an H200 (tools/results), 92 % of the data sheet's on the other."""

TYPES = ("bfloat16", "int8", "int4")
_CAPACITY = 8448
_SIZES = dict.fromkeys(names.SYMBOLS, 1) | {names.ROW_EDGES: 2, names.CAPACITY: _CAPACITY}


@dataclass(frozen=True)
class _Unread:
    """A file of weights that nothing reads."""

    name: str = "weights.bin"

    def place(self, size: int, read: Callable[[], NDArray[np.generic]]) -> int:
        return 0


def write_hollow_llama(shape: Shape, folder: Path) -> None:
    """Write a checkpoint whose tensors have sizes and no values: a sparse file."""
    kv = shape.hidden // shape.heads * shape.kv_heads
    tensors = {"model.embed_tokens.weight": (shape.vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    tensors["lm_head.weight"] = (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, size in {
            "input_layernorm": (shape.hidden,),
            "post_attention_layernorm": (shape.hidden,),
            "self_attn.q_proj": (shape.hidden, shape.hidden),
            "self_attn.k_proj": (kv, shape.hidden),
            "self_attn.v_proj": (kv, shape.hidden),
            "self_attn.o_proj": (shape.hidden, shape.hidden),
            "mlp.gate_proj": (shape.intermediate, shape.hidden),
            "mlp.up_proj": (shape.intermediate, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.intermediate),
        }.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = size
    at, header = 0, {}
    for name, size in tensors.items():
        end = at + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 2 * _CAPACITY, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def engine_of(shape: Shape, kind: str) -> KernelEngine:
    """Return the target's engine with weights of one of `TYPES`, as a plan would have it."""
    with tempfile.TemporaryDirectory() as folder:
        write_hollow_llama(shape, Path(folder))
        graph = export_target(defer_decoder(Path(folder), "float32"), _CAPACITY)
        whole = kind == "bfloat16"
        quantize("target", graph, None if whole else WeightForm(4 if kind == "int4" else 8, 8))
        lower("target", graph, "cuda", rows=1, kv_cache="bfloat16" if whole else "float16")
        limits = dict.fromkeys(names.SYMBOLS, 600) | {names.VIEW: _CAPACITY, names.ROWS: 1, names.ROW_EDGES: 2}
        return Emitter("target", graph.graph, limits, _Unread(), HANDLERS, "bfloat16" if whole else "float32").emit()


def figures(costs: list[LaunchCost]) -> dict[str, Any]:
    """Return launches and bytes of a step, and the seconds that they come to on each of `GPUS`."""
    moved, launches = sum(cost.moved for cost in costs), len(costs)
    times = {}
    for gpu, speed in GPUS.items():
        seconds = moved / speed + GAP * launches
        times[gpu] = {"ms": 1e3 * seconds, "share_of_copies": moved / speed / seconds}
    return {
        "launches": launches,
        "moved_bytes": moved,
        "operations": sum(cost.operations for cost in costs),
        "kernels": dict(Counter(cost.launch.kernel for cost in costs).most_common()),
        "gpus": times,
    }


def measure(shapes: list[str], kinds: list[str], keys: int, rows: list[int]) -> list[dict[str, Any]]:
    found = []
    for name in shapes:
        for kind in kinds:
            engine = engine_of(SHAPES[name], kind)
            for row in rows:
                own: Mapping[str, int] = {**_SIZES, names.VIEW: keys} | dict.fromkeys(
                    (names.NEW, names.LOGITS, names.PLACES, names.FEATURED), row
                )
                found.append(
                    {"model": name, "weights": kind, "tokens": row, "keys": keys} | figures(launch_costs(engine, own))
                )
    return found


def markdown(found: list[dict[str, Any]]) -> str:
    heads = [f"{gpu}, ms (share of copies)" for gpu in GPUS]
    lines = [
        f"| {' | '.join(('model', 'weights', 'tokens', 'keys', 'launches', 'GB moved', *heads))} |",
        f"|{' --- |' * (6 + len(heads))}",
    ]
    for row in found:
        cells = [row["model"], row["weights"], row["tokens"], row["keys"], row["launches"]]
        cells.append(f"{row['moved_bytes'] / 1e9:.2f}")
        cells += [f"{gpu['ms']:.2f} ({gpu['share_of_copies']:.0%})" for gpu in row["gpus"].values()]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def occupancy(architecture: str, costs: list[LaunchCost]) -> list[dict[str, Any]]:
    """Return what each kernel of a step takes of a multiprocessor, compiled for `architecture`."""
    on = MULTIPROCESSORS[architecture]
    resources = kernel_resources(compile_kernels(architecture, "engine.cu"))
    found = []
    for launch in {cost.launch.kernel: cost.launch for cost in costs}.values():
        own, dynamic = resources[launch.kernel], formula(launch.shared).value(_SIZES)
        blocks = own.blocks(on, launch.threads, dynamic)
        found.append(
            {
                "kernel": launch.kernel, "threads": launch.threads, "registers": own.registers, "stack": own.stack,
                "shared": own.shared + dynamic, "blocks": blocks, "warps": blocks * -(-launch.threads // 32),
            }
        )  # fmt: skip
    return found


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(sys.argv[1:] if given is None else given))


def _run(given: list[str]) -> int:
    parser = Parser(
        prog="python -m tools.kernel_costs",
        description=__doc__,
        epilog="example: %(prog)s --shapes 8b --weights int4 --tokens 1,8,32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", default="1b,8b", help=f"of {', '.join(SHAPES)}, with commas")
    parser.add_argument("--weights", default="bfloat16,int4", help=f"of {', '.join(TYPES)}, with commas")
    parser.add_argument("--tokens", default="1", help="new tokens of a step, with commas (default 1)")
    parser.add_argument("--keys", type=int, default=512, help=f"keys in view, up to {_CAPACITY} (default 512)")
    parser.add_argument(
        "--architecture", choices=MULTIPROCESSORS, help="also: what the kernels take of a multiprocessor of this kind"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(given)
    shapes, kinds, rows = _lists(parser, arguments)
    found = measure(shapes, kinds, arguments.keys, rows)
    taken: list[dict[str, Any]] = []
    if arguments.architecture is not None:
        steps = [launch_costs(engine_of(SHAPES[shapes[0]], kind), _SIZES) for kind in kinds]
        taken = occupancy(arguments.architecture, [cost for step in steps for cost in step])
    if arguments.json:
        stdout.print(json.dumps({"steps": found, "kernels": taken}, indent=1), markup=False, soft_wrap=True)
        return 0
    stdout.print(markdown(found), markup=False, soft_wrap=True)
    if taken:
        lines = [f"| {' | '.join(taken[0])} |", f"|{' --- |' * len(taken[0])}"]
        lines += [f"| {' | '.join(map(str, row.values()))} |" for row in taken]
        stdout.print("\n" + "\n".join(lines), markup=False, soft_wrap=True)
    return 0


def _lists(parser: Parser, arguments: Namespace) -> tuple[list[str], list[str], list[int]]:
    shapes, kinds = arguments.shapes.split(","), arguments.weights.split(",")
    for given, known, option in ((shapes, SHAPES, "--shapes"), (kinds, TYPES, "--weights")):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"argument {option}: there is no {', '.join(unknown)}; choose of {', '.join(known)}")
    if not 1 <= arguments.keys <= _CAPACITY:
        parser.error(f"argument --keys: must be 1 to {_CAPACITY}")
    try:
        rows = [int(text) for text in arguments.tokens.split(",")]
    except ValueError:
        parser.error(f"argument --tokens: {arguments.tokens!r} are no numbers with commas")
    if not all(1 <= row <= 600 for row in rows):
        parser.error("argument --tokens: must be 1 to 600 each")
    return shapes, kinds, rows


if __name__ == "__main__":
    sys.exit(main())
