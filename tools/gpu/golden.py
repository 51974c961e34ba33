"""Golden launches: kernels with their arguments, and what the CPU's emulation of them left in memory; one .npz file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Golden:
    """One launch. `before` are its tensors, None for a null pointer, `after` what they become.

    Tensors at the places `scratch` are not compared. Results are equal to the bit where `tolerance` is 0, else within
    it and the relative error `rounding`, as numbers of `kinds` (dtypes by place, where NumPy's are others). The result
    of a row at the end of the tensor at place `rowwise` is the same in all launches of the same `company`.
    """

    name: str
    kernel: str
    blocks: int
    threads: int
    shared: int
    numbers: list[int]
    before: list[Array | None]
    after: list[Array | None]
    scratch: list[int]
    tolerance: float = 0.0
    rounding: float = 0.0
    kinds: dict[str, str] | None = None
    company: str = ""
    rowwise: int = -1


@dataclass(frozen=True)
class Verdict:
    """How a launch compares: `differ` numbers have other bits, by at most `error`."""

    name: str
    kernel: str
    passed: bool
    differ: int
    error: float


def write_golden(path: Path, cases: Sequence[Golden]) -> None:
    arrays: dict[str, Array] = {}
    keys: dict[tuple[bytes, str, tuple[int, ...]], str] = {}  # by content: equal arrays are there once
    heads = []
    for case in cases:
        head = asdict(case)
        for when in ("before", "after"):
            given: list[Array | None] = head.pop(when)
            head[when] = []
            for each in given:
                if each is None:
                    head[when].append(None)
                    continue
                if each.dtype.kind == "V":  # bfloat16, which NumPy's files do not know
                    each = each.view(np.uint16)
                key = keys.setdefault((each.tobytes(), each.dtype.name, each.shape), str(len(arrays)))
                arrays[key] = each
                head[when].append(key)
        heads.append(head)
    arrays["cases"] = np.frombuffer(json.dumps(heads).encode(), np.uint8)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def read_golden(path: Path) -> list[Golden]:
    with np.load(path) as file:
        arrays: Mapping[str, Array] = dict(file)
    cases = []
    for head in json.loads(arrays["cases"].tobytes()):
        for when in ("before", "after"):
            head[when] = [None if key is None else arrays[key] for key in head[when]]
        cases.append(Golden(**head))
    return cases


def compare(case: Golden, found: Sequence[Array | None]) -> Verdict:
    """Compare all tensors of a launch with what the emulator left: outputs, and inputs that must stay as they were."""
    passed, differ, error = True, 0, 0.0
    for place, (expected, got) in enumerate(zip(case.after, found, strict=True)):
        if expected is None or got is None or place in case.scratch:
            continue
        size = expected.itemsize
        other = (expected.reshape(-1).view(np.uint8) != got.reshape(-1).view(np.uint8)).reshape(-1, size).any(-1)
        if not other.any():
            continue
        kind = (case.kinds or {}).get(str(place), expected.dtype.name)
        wanted, numbers = (_widen(each.reshape(-1)[other], kind) for each in (expected, got))
        numbers_differ = ~(np.isnan(wanted) & np.isnan(numbers))  # a GPU's own operations know one NaN
        wanted, numbers = wanted[numbers_differ], numbers[numbers_differ]
        if not len(wanted):
            continue
        differ += len(wanted)
        distance = np.abs(wanted - numbers)
        error = max(error, float(np.nan_to_num(distance, nan=np.inf).max()))
        passed &= bool(case.tolerance) and bool((distance <= case.tolerance + case.rounding * np.abs(wanted)).all())
    return Verdict(case.name, case.kernel, passed, differ, error)


def _widen(numbers: Array, kind: str) -> NDArray[np.float64]:
    if kind == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (numbers.view(np.float16) if kind == "float16" else numbers).astype(np.float64)


def compare_company(cases: Sequence[Golden], results: Sequence[Sequence[Array | None]]) -> list[Verdict]:
    """Compare the rows of each company with those of its largest launch, to the bit."""
    verdicts = []
    of_company = [(case, found[case.rowwise]) for case, found in zip(cases, results, strict=True) if case.company]
    for case, rows in of_company:
        assert rows is not None
        whole = max((r for c, r in of_company if c.company == case.company and r is not None), key=len)
        if rows is whole:
            continue
        differ = int((rows.view(np.uint8) != whole[-len(rows) :].view(np.uint8)).any(-1).sum())
        verdicts.append(Verdict(f"{case.name}, rows in company", case.kernel, not differ, differ, 0.0))
    return verdicts
