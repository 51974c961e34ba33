"""Chains of products by turns."""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Callable, Sequence
from importlib.metadata import version
from statistics import median
from time import perf_counter, sleep
from typing import Any, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from outrider.plans.machine import available_cores
from outrider.runtime.runtime import check_threads
from outrider.tools.lab.matmul.onnx_chain import SPIN_MS, OnnxChain, for_matmul_nbits, for_our_op
from outrider.tools.lab.matmul.shapes import SHAPES, Product
from outrider.tools.measuring import measuring, paired_ratios, run_in_turn

OURS, ONNXRUNTIME, OPENVINO = "outrider", "onnxruntime", "openvino"
_PASSES = 8  # in a row; the first counts for nothing
_REST_MS = 3 * SPIN_MS


class Pass(Protocol):
    """A pass over an input that was bound; `output` is what the last call gave."""

    output: NDArray[np.float32]

    def __call__(self) -> None: ...


class Chain(Protocol):
    """All products of a model in one engine."""

    def bind(self, x: NDArray[np.float32]) -> Pass: ...


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every shape, type of weights and number of rows: `reps` turns of each engine, those of one type in memory."""
    check_threads(options.threads)
    threads = options.threads or available_cores()
    cases = [(shape, bits) for shape in options.shape for bits in options.bits]
    rows: list[dict[str, Any]] = []
    with measuring([1.0] * len(cases) * len(options.rows)) as begin:
        for shape, bits in cases:
            chains = load(SHAPES[shape].products(), bits, threads)
            found = {}
            for count in options.rows:
                begin(f"{shape}, int{bits}, {count} rows")
                found[count] = _take_turns(chains, SHAPES[shape].hidden, count, options.reps)
            rows += [
                {"shape": shape, "type": f"int{bits}", "rows": count, **row}
                for count, times in found.items()
                for row in figures(times, found[options.rows[0]])
            ]
            del chains
            gc.collect()  # before the next ones are loaded
    versions, missing = {ONNXRUNTIME: onnxruntime.__version__}, []
    if _has_openvino():
        versions[OPENVINO] = version("openvino")
    else:
        missing.append({"engine": OPENVINO, "reason": "not installed; run `pip install openvino`"})
    return {
        "threads": threads,
        "reps": options.reps,
        "passes": _PASSES - 1,
        "versions": versions,
        "weights": {shape: SHAPES[shape].weights for shape in options.shape},
        "missing": missing,
        "rows": rows,
    }


def load(products: Sequence[Product], bits: int, threads: int) -> dict[str, Chain]:
    """Return the products in every engine that is installed, ours first."""
    chains: dict[str, Chain] = {
        OURS: OnnxChain(products, bits, threads, for_our_op),
        ONNXRUNTIME: OnnxChain(products, bits, threads, for_matmul_nbits),
    }
    if _has_openvino():
        from outrider.tools.lab.matmul.openvino_chain import OpenVinoChain

        chains[OPENVINO] = OpenVinoChain(products, bits, threads)
    return chains


def _has_openvino() -> bool:
    return importlib.util.find_spec("openvino") is not None


def _take_turns(chains: dict[str, Chain], width: int, rows: int, reps: int) -> dict[str, list[list[float]]]:
    """Return for each engine the milliseconds of each pass in each of its turns."""
    x = np.random.default_rng(rows).standard_normal((1, rows, width), np.float32)
    passes = {engine: chain.bind(x) for engine, chain in chains.items()}

    def run(engine: str, *_: object) -> list[float]:
        sleep(_REST_MS / 1000)
        return _several(passes[engine])

    # The warm-up brings weights into memory, and lets engines compile for this number of rows.
    return run_in_turn(list(passes), [x], reps, run, begin=lambda _: None)


def _several(one: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(_PASSES):
        started = perf_counter()
        one()
        found.append(1000 * (perf_counter() - started))
    return found[1:]


def figures(times: dict[str, list[list[float]]], first: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return a row for each engine: minimum and median of all passes, how many times those of the `first` number of
    rows that is (by minima), and for the others what part of their time ours takes."""
    found = []
    ours = times[OURS]
    for engine, turns in times.items():
        lowest = _lowest(turns)
        row: dict[str, Any] = {
            "engine": engine,
            "min_ms": lowest,
            "median_ms": median(ms for turn in turns for ms in turn),
            "against_first": lowest / _lowest(first[engine]),
            "ratio": None,
            "median_ratio": None,
        }
        if engine != OURS:
            row["ratio"] = _lowest(ours) / lowest
            row["median_ratio"] = median(paired_ratios(map(median, ours), map(median, turns)))
        found.append(row)
    return found


def _lowest(turns: Sequence[Sequence[float]]) -> float:
    return min(min(turn) for turn in turns)
