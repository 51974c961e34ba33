"""Golden launches of every kernel of engines and of some ops: `python -m tests.plugins.golden OUT.npz`.

The tests of `test_engine_kernels.py` are run on the emulator, with some of their parameters, and what they launch is
kept: arguments, and what the emulator left in memory.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.kernels.code import Nodes, Word, write
from compiler.kernels.sizes import size
from plugins.cuda import DeviceOp
from plugins.cuda.engine_kernels import ENGINE_KERNELS, FORMS, half_bytes
from plugins.cuda.launches import ELEMENTS, LAUNCHES
from tests.plugins import test_engine_kernels
from tests.plugins.accept_step import equal_slots, forest
from tests.plugins.emulator import ENGINES, Emulator, Memory, compile_emulator
from tests.plugins.engine_driver import launch
from tests.plugins.gpu import Gpu
from tests.plugins.test_engine_kernels import narrowed, poisoned
from tools.gpu.golden import Array, Golden, write_golden

ROWS = (1, 8, 32, 37)
MOST_OF_TEST, MOST_BYTES = 5, 600_000  # sets of parameters; bytes of a launch's tensors
_ROUNDING = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # a result on the other side of a boundary


class Recorder(Gpu):
    """Takes launches as a GPU does, runs them on the emulator, and keeps them."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator, self.cases = emulator, list[Golden]()
        self.test = ""

    def launch(
        self, kernel: str, blocks: int, threads: int, tensors: Sequence[Array | None], numbers: Sequence[int],
        shared: int,
    ) -> None:  # fmt: skip
        written = ENGINE_KERNELS[kernel]
        case = self.record(kernel, blocks, threads, tensors, numbers, shared)
        case.scratch = [place for place, name in enumerate(written.tensors) if name == "partial"]
        if "half_product" in kernel:
            named = dict(zip(written.numbers, numbers, strict=True))
            place, form = written.tensors.index("to"), FORMS[named["form"]]
            result = case.after[place]
            assert form != "int8", "of halves, integers on the other side of a boundary are not told apart"
            assert result is not None
            case.kinds, case.rounding = {str(place): form}, _ROUNDING[form]
            wide = result if form == "float32" else test_engine_kernels.widened(result, form)
            case.tolerance = 2e-5 * float(np.abs(wide).max())

    def record(
        self, kernel: str, blocks: int, threads: int, tensors: Sequence[Array | None], numbers: Sequence[int],
        shared: int = 0, most_threads: int = 512, scratch: Sequence[int] = (),
    ) -> Golden:  # fmt: skip
        before = [None if each is None else each.copy() for each in tensors]
        values: list[Any] = [ctypes.c_uint64(0 if each is None else each.ctypes.data) for each in tensors]
        values += [ctypes.c_int64(number) for number in numbers]
        self.emulator.launch(kernel, blocks, min(threads, most_threads), values, shared)
        after = [None if each is None else each.copy() for each in tensors]
        case = Golden(
            self.test, kernel, blocks, threads, shared, [int(each) for each in numbers], before, after, list(scratch)
        )
        self.cases.append(case)
        return case

    def op(
        self, name: str, tensors: Mapping[str, Array], attributes: Mapping[str, int | float], extents: Sequence[int]
    ) -> None:
        """Run an op. Its workspace is not compared."""
        spaces: dict[str, Array] = {}

        def workspace(space: str, size: int, zeroed: bool) -> int:
            spaces[space] = np.full(size, 0 if zeroed else 0xA5, np.uint8)
            return int(spaces[space].ctypes.data)

        op = DeviceOp(name, {each: Memory(array) for each, array in tensors.items()}, attributes, workspace)
        blocks, threads, values = op.values(*extents)
        spec, every = LAUNCHES[name], {**tensors, **spaces}
        numbers = [value.value for value in values[len(spec.pointers) :]]
        scratch = [place for place, pointer in enumerate(spec.pointers) if pointer in spaces]
        given = [every[pointer] for pointer in spec.pointers]
        self.record(spec.kernel, blocks, threads, given, numbers, most_threads=64, scratch=scratch)


def parameters_of(test: Any) -> list[dict[str, Any]]:
    """Some of a test's sets of parameters, far from each other."""
    axes: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        given, values = mark.args
        named = given if isinstance(given, tuple) else (given,)
        wanted = [value for value in values if named != ("rows",) or value in ROWS] or values
        axes.append([dict(zip(named, value if len(named) > 1 else (value,), strict=True)) for value in wanted])
    sets = [{key: value for part in parts for key, value in part.items()} for parts in product(*axes)]
    step = max(1, -(-len(sets) // MOST_OF_TEST))
    while gcd(step, len(sets)) > 1:  # so that it goes over every axis
        step += 1
    return sets[::step]


def record_tests(recorder: Recorder) -> None:
    for name, test in sorted(vars(test_engine_kernels).items()):
        if name.startswith("test_") and "engine_kernels" in inspect.signature(test).parameters:
            for given in parameters_of(test):
                recorder.test = f"{name.removeprefix('test_')}{list(given.values())}"
                test(recorder, **given)


def record_company(recorder: Recorder) -> None:
    """Rows of half products, in companies of several sizes."""
    rng, inputs, outputs = np.random.default_rng(9), 544, 136
    for dtype in ELEMENTS[1:]:
        x = narrowed(rng.normal(size=(max(ROWS), inputs)).astype(np.float32), dtype)
        weight = narrowed(rng.normal(size=(outputs, inputs)).astype(np.float32), dtype)
        for rows in ROWS:
            recorder.test = f"half products, {dtype}, {rows} rows"
            numbers = {"rows": rows, "inputs": inputs, "outputs": outputs, "element": ELEMENTS.index(dtype)}
            launch(
                recorder, "outrider_half_product",
                {"x": x[-rows:].copy(), "weight": weight, "to": poisoned(rows, outputs)},
                {**numbers, "unit": 0, "form": 0}, 5 * -(-rows // 32), shared=half_bytes(rows),
            )  # fmt: skip
            case = recorder.cases[-1]
            case.company, case.rowwise = dtype, ENGINE_KERNELS[case.kernel].tensors.index("to")


def record_evaluate(recorder: Recorder) -> None:
    """The kernel of small tensors, on code as the emitter writes it: element i is 3 * i + N."""
    nodes = Nodes()
    rule = nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, nodes.index, nodes.constant(3)), nodes.size(size("N")))
    code = np.array(write(rule).words, np.int64)
    recorder.test = "evaluate"
    spec = ENGINE_KERNELS["outrider_evaluate"]
    numbers = dict.fromkeys(spec.numbers, 1) | {"elements": 300, "length": len(code), "real": 0, "N": 7}
    launch(recorder, spec.name, {"to": np.full(300, -77), "code": code}, numbers, 2)


def record_ops(recorder: Recorder) -> None:
    rng = np.random.default_rng(2)
    recorder.test = "sampling"
    logits: NDArray[np.float32] = (rng.normal(size=(5, 3000)) * 3).astype(np.float32)
    slots = equal_slots(2, temperature=0.8, top_p=0.9)
    recorder.op(
        "Sample",
        {
            "logits": logits, "logit_indices": np.arange(5), "positions": np.arange(5) + 40,
            "branch": np.array([0, 1, 0, 1, 1]), "committed": np.full(5, -77), **vars(slots),
        },
        {"purpose": 0}, (5, 5),
    )  # fmt: skip
    recorder.test = "accepting trees"
    token_ids, parent, branch, logit_indices = forest(rng, 2, 2, 9, 40, 0.5)
    count, new = len(logit_indices), len(token_ids)
    recorder.op(
        "TreeAccept",
        {
            "logits": (rng.normal(size=(count, 40)) * 3).astype(np.float32), "logit_indices": logit_indices,
            "positions": np.arange(new) + 7, "branch": branch, "token_ids": token_ids, "parent": parent,
            "committed": np.full(count, -77), "accepted_count": np.full(2, -77),
            "kept_indices": np.full(new, -77), "kept_count": np.full(1, -77), **vars(slots),
        },
        {}, (new, count),
    )  # fmt: skip
    recorder.test = "masks"
    recorder.op(
        "BimMask",
        {
            "bim": rng.integers(-1, 2, (2, 64)), "past_length": np.array([40, 9]), "row_splits": np.array([0, 3, 5]),
            "branch": np.array([0, 0, 1, 0, 0]), "parent": np.array([-1, 0, 0, -1, 3]),
            "attn_bias": poisoned(2, 1, 3, 64),
        },
        {}, (5, 64, 2, 3),
    )  # fmt: skip


def chosen(cases: Sequence[Golden]) -> Iterator[Golden]:
    """Launches that are small, each once, with no more of one test's kernel than tell something new."""
    seen: Counter[tuple[str, str]] = Counter()
    for case in cases:
        key = case.kernel, case.name
        seen[key] += 1
        total = sum(a.nbytes for i, a in enumerate(case.before) if a is not None and i not in case.scratch)
        if total <= MOST_BYTES and (seen[key] <= 2 or case.company):
            yield case


def main(out: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "engines.so"
        compile_emulator(library, ENGINES)
        recorder = Recorder(Emulator(library))
        for record in (record_tests, record_company, record_evaluate, record_ops):
            record(recorder)
    cases = list(chosen(recorder.cases))
    missing = ENGINE_KERNELS.keys() - {case.kernel for case in cases}
    assert not missing, f"no golden launch of {', '.join(sorted(missing))}"
    write_golden(out, cases)
    kernels = Counter(case.kernel for case in cases)
    print(f"{len(cases)} golden launches: {', '.join(f'{kernel} {count}' for kernel, count in kernels.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
