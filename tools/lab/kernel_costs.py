"""What the target's engine of the backend `cuda` moves and launches: `python -m outrider.tools.lab.kernel_costs`.

Models of the shapes of `tools.lab.gpu` are exported and lowered as for a plan, without their weights, which nothing
reads here. Ops around the engine are left out: a plain step also launches set_numbers, take_tokens, bim_mask, sample
and keep_tokens. Two kinds of computed times: a bound, the bytes at the speed of copies and an empty kernel for each
launch; and for one token on an H200 an
estimate, from what each kernel took there by its bytes (`gpu/` measures it). Attention's own time is not modelled:
keys are counted once, and its kernel reads them again for each token, so
that after long contexts a step takes longer than this says. With `--architecture` the kernels are compiled, and a
second table has what each takes of a multiprocessor, and how many of its blocks run there, with the most shared memory
that a launch of these steps asks for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from itertools import product
from typing import Any

from outrider.commands.arguments import Parser, counts, whole_number
from outrider.commands.console import guarded, stdout
from outrider.plans.kernel_costs import LaunchCost, launch_costs
from outrider.plugins.cuda.compile import compile_kernels
from outrider.plugins.cuda.launches import THREADS
from outrider.plugins.cuda.resources import MULTIPROCESSORS, kernel_resources
from outrider.tools.lab.gpu.models import CAPACITY, SHAPES, TYPES, model_of
from outrider.tools.markdown import markdown_table
from outrider.tools.measuring import figure, names_among

Row = dict[str, Any]

GAP = 0.4e-6
"""Seconds of an empty kernel of a CUDA graph on an H200 (tools/results/gpu-2026-11-27-sm_90.md)."""

GPUS = {"H200": 4263e9, "RTX 4090": 0.92 * 1008e9}
"""Bytes a second that copies move: measured on an H200 (tools/results), 92 % of the data sheet's on the other."""

MEASURED = {
    "outrider_half_product": (3.2e-6, 4.02e12), "outrider_quant_product": (2.7e-6, 2.95e12),
    "outrider_attend": (10e-6, GPUS["H200"]), "outrider_rms_norm": (2.8e-6, GPUS["H200"]),
    "outrider_append": (2.4e-6, GPUS["H200"]), "outrider_visible": (6.8e-6, GPUS["H200"]),
    "outrider_evaluate": (8.9e-6, GPUS["H200"]), "outrider_half_gather": (4.4e-6, GPUS["H200"]),
    "outrider_quant_gather": (4.3e-6, GPUS["H200"]),
}  # fmt: skip
"""Seconds of a launch for one token on an H200, and bytes a second beyond: fitted to the kernels of 1B and 8B there
(tools/results/gpu-2026-11-27-sm_90.md)."""


def figures(costs: list[LaunchCost], tokens: int) -> Row:
    """Return launches and bytes of a step, their bound on each of `GPUS`, and for one token an estimate."""
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
        "h200_estimate_ms": 1e3 * sum(_estimate(cost) for cost in costs) if tokens == 1 else None,
    }


def _estimate(cost: LaunchCost) -> float:
    start, speed = MEASURED.get(cost.launch.kernel, (5e-6, GPUS["H200"]))
    return start + cost.moved / speed


def steps(shapes: list[str], kinds: list[str], keys: int, rows: list[int]) -> list[tuple[Row, list[LaunchCost]]]:
    found = []
    for name, kind in product(shapes, kinds):
        model = model_of(SHAPES[name], kind)
        for row in rows:
            step = {"model": name, "weights": kind, "tokens": row, "keys": keys}
            found.append((step, launch_costs(model.engine, model.sizes(row, keys))))
    return found


def markdown(found: list[Row]) -> list[str]:
    heads = [*(f"{gpu}, bound, ms (share of copies)" for gpu in GPUS), "H200, estimate, ms"]
    lines = []
    for row in found:
        cells = [row["model"], row["weights"], row["tokens"], row["keys"], row["launches"]]
        cells.append(f"{row['moved_bytes'] / 1e9:.2f}")
        cells += [f"{gpu['ms']:.2f} ({gpu['share_of_copies']:.0%})" for gpu in row["gpus"].values()]
        lines.append([*cells, figure(row["h200_estimate_ms"], ".2f")])
    return markdown_table(("model", "weights", "tokens", "keys", "launches", "GB moved", *heads), lines)


def occupancy(architecture: str, costs: list[LaunchCost]) -> list[Row]:
    """Return what every kernel takes of a multiprocessor, compiled for `architecture`.

    Those that are launched have the most shared memory of their launches, others none beside their own.
    """
    on = MULTIPROCESSORS[architecture]
    launched = {cost.launch.kernel: cost for cost in sorted(costs, key=lambda cost: cost.shared)}
    found = []
    for kernel, own in sorted(kernel_resources(compile_kernels(architecture, "engine.cu")).items()):
        most = launched.get(kernel)
        threads, dynamic = (THREADS, 0) if most is None else (most.launch.threads, most.shared)
        blocks = own.blocks(on, threads, dynamic)
        found.append(
            {
                "kernel": kernel.removeprefix("outrider_"), "threads": threads, "registers": own.registers,
                "stack": own.stack, "shared": own.shared + dynamic, "blocks": blocks,
                "warps": blocks * -(-threads // 32),
            }
        )  # fmt: skip
    return found


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(sys.argv[1:] if given is None else given))


def _run(given: list[str]) -> int:
    parser = Parser(
        prog="python -m outrider.tools.lab.kernel_costs",
        description=__doc__,
        epilog="example: %(prog)s --shapes 8b --weights int4 --tokens 1,8,32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", type=names_among(SHAPES), default=["1b", "8b"], help="of models (1b,8b)")
    parser.add_argument("--weights", type=names_among(TYPES), default=["bfloat16", "int4"], help="(bfloat16,int4)")
    parser.add_argument("--tokens", type=counts, default=[1], metavar="N,...", help="new tokens of a step (1)")
    keys = f"keys in view, up to {CAPACITY} (default 512)"
    parser.add_argument("--keys", type=whole_number(1, CAPACITY), default=512, help=keys)
    parser.add_argument(
        "--architecture", choices=MULTIPROCESSORS, help="also: what the kernels take of a multiprocessor of this kind"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(given)
    measured = steps(arguments.shapes, arguments.weights, arguments.keys, arguments.tokens)
    found = [step | figures(costs, step["tokens"]) for step, costs in measured]
    taken: list[Row] = []
    if arguments.architecture is not None:
        taken = occupancy(arguments.architecture, [cost for _, costs in measured for cost in costs])
    if arguments.json:
        stdout.print(json.dumps({"steps": found, "kernels": taken}, indent=1), markup=False, soft_wrap=True)
        return 0
    lines = markdown(found)
    if taken:
        lines += ["", *markdown_table(list(taken[0]), [list(row.values()) for row in taken])]
    stdout.print("\n".join(lines), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
