"""Whether a row's result depends on that row alone, on this processor: a plan's probe is run, once for each machine.

On the CPU the same seed gives the same tokens because a token has the same bits in any company. Our own kernels see to
that on every processor; ONNX Runtime's choose other code on other processors, and some of it computes one row in
another order than several. So a plan carries a probe (`plans.manifest.Probe`), which loading runs where it has not run
before: on another processor, version of ONNX Runtime, build of our ops, or number of threads. That it passed is
remembered in the user's cache folder; where that cannot be written, every load probes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.backends import BACKENDS
from outrider.plans.errors import PlanError, RequestError
from outrider.plans.machine import available_cores, instruction_set, processor
from outrider.plans.manifest import Manifest, Probe
from outrider.plans.onnx_operators import check_operators
from outrider.plans.plan import Plan, file_sha256
from outrider.plugins.onnxruntime_ops import SAME_ON_EVERY_PROCESSOR, cpu_library
from outrider.runtime.files import cache_folder

if TYPE_CHECKING:  # a runtime that runs nothing on the processor does not need ONNX Runtime
    import onnxruntime as ort

Exactness = Literal["probed", "unchecked"]
"""Whether loading a plan probes, or leaves open whether tokens are the same in any company."""

ROWS = 32
"""Rows of the largest company."""

SHORT = ((0, 1), (31, 32), (5, 7), (8, 16), (16, 32))
"""Rows that a load compares with the same rows among all: 1, 2, 8 and 16 of them, from the first to the last."""

EVERY = tuple((start, start + size) for size in range(1, ROWS) for start in (0, ROWS - size))
"""Any number of rows, at the beginning and at the end."""

_LARGEST = 2**28
"""Elements of an input, far above those of any probe of ours."""

_LOG = logging.getLogger("outrider")


@dataclass(frozen=True)
class ProbeResult:
    """A probe that passed: how many `ops` it has, and the `seconds` that it took; `remembered`, where it ran before."""

    ops: int
    seconds: float
    remembered: bool

    @property
    def text(self) -> str:
        """What was done, for the reader."""
        return (
            f"probed this machine, on which the plan has not run before: rows of {self.ops} ops have the same bits "
            f"alone and among up to {ROWS} ({1e3 * self.seconds:.0f} ms)"
        )


def check_exactness(exactness: str) -> None:
    """Raise `RequestError` unless `exactness` is one of `Exactness`."""
    if exactness not in get_args(Exactness):
        raise RequestError(f"exactness is {exactness!r}; pass one of {', '.join(get_args(Exactness))}.")


def run_probe(plan: Plan, probe: Probe | None, threads: int, exactness: Exactness) -> ProbeResult | None:
    """Probe as `exactness` says; None for a backend that promises nothing, and where it is unchecked.

    Raises `PlanError` as `ensure_exact`.
    """
    if probe is None:
        return None
    if exactness == "unchecked":
        _LOG.warning("%s runs unchecked: drafts and neighbours may change its tokens on this machine", plan.root)
        return None
    return ensure_exact(plan, probe, threads)


def ensure_exact(plan: Plan, probe: Probe, threads: int) -> ProbeResult:
    """Run the probe of `plan` on `threads`, as of its engines, unless it has passed on this machine before.

    Raises `PlanError` where a row's bits depend on its company, or the probe cannot be run.
    """
    import onnxruntime as ort

    from outrider.runtime.backends.onnxruntime_cpu import session_options

    began = perf_counter()
    path, ops = plan.file(probe.file), len(set(probe.ops.values()))
    conditions = _conditions(plan, probe, threads)
    if _is_remembered(conditions):
        return ProbeResult(ops, perf_counter() - began, remembered=True)
    check_operators(path)
    try:
        session = ort.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
        found = differing(session, SHORT)
    except Exception as error:  # ONNX Runtime raises plain Exceptions of its own kinds
        raise PlanError(
            f"{path} cannot be run by ONNX Runtime {ort.__version__}: {error}; build the plan again"
        ) from None
    if found:
        raise PlanError(_refusal(plan, {probe.ops.get(output, output): rows for output, rows in found.items()}))
    _remember(conditions)
    result = ProbeResult(ops, perf_counter() - began, remembered=False)
    _LOG.info("%s", result.text)
    return result


def differing(session: ort.InferenceSession, companies: Iterable[tuple[int, int]]) -> dict[str, list[int]]:
    """Run a probe's graph on `ROWS` random rows, and again on each of `companies`, rows `[start, stop)` of these.

    Returns, by output, of how many rows the companies are in which a row has other bits than among all; nothing of an
    output that never differs. Raises `ValueError` for a graph that is no probe.
    """
    shapes = {tensor.name: tuple(tensor.shape) for tensor in (*session.get_inputs(), *session.get_outputs())}
    data = {tensor.name: _random(shapes[tensor.name], seed) for seed, tensor in enumerate(session.get_inputs())}
    outputs = [tensor.name for tensor in session.get_outputs()]
    whole = dict(zip(outputs, session.run(outputs, data), strict=True))
    found: dict[str, list[int]] = {}
    for start, stop in companies:
        part = {name: _rows(value, shapes[name], start, stop) for name, value in data.items()}
        for name, value in zip(outputs, session.run(outputs, part), strict=True):
            if not _same_bits(value, _rows(whole[name], shapes[name], start, stop)):
                found.setdefault(name, []).append(stop - start)
    return found


def _random(shape: tuple[int | str, ...], seed: int) -> NDArray[np.float32]:
    """Return normal numbers; rows are of different sizes, so that anything that all rows have in common shows."""
    extents = [ROWS if extent == names.PROBED else int(extent) for extent in shape]
    if np.prod(extents, dtype=float) > _LARGEST:
        raise ValueError(f"an input of {extents} is larger than any of a probe")
    values = np.random.default_rng(seed).standard_normal(extents, dtype=np.float32)
    if names.PROBED in shape:
        sizes = np.exp2(np.arange(ROWS, dtype=np.float32) % 5 - 2)
        values *= sizes.reshape([-1 if extent == names.PROBED else 1 for extent in shape])
    return values


def _rows(value: NDArray[np.float32], shape: tuple[int | str, ...], start: int, stop: int) -> NDArray[np.float32]:
    """Return rows `[start, stop)`, or all of what has none."""
    index = tuple(slice(start, stop) if extent == names.PROBED else slice(None) for extent in shape)
    return np.ascontiguousarray(value[index])


def _same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Compare bits. NaNs are alike: weights may have some, and which of them comes out means nothing."""
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    return a.shape == b.shape and bool(same.all())


def _refusal(plan: Plan, found: Mapping[str, list[int]]) -> str:
    import onnxruntime as ort

    op, rows = next(iter(found.items()))
    others = f" (and {len(found) - 1} other ops)" if len(found) > 1 else ""
    return (
        f"{plan.root} is not exact on this machine ({processor()}, ONNX Runtime {ort.__version__}): a row of "
        f"{op}{others} has other bits among {ROWS} rows than among {', '.join(map(str, sorted(set(rows))))}, so that "
        "drafts and neighbours could change tokens. Quantise the weights (`weights: {type: int8}` in the recipe: our "
        'own kernels), use another version of ONNX Runtime, or load it with exactness="unchecked" and give that up'
    )


def kernels_here() -> dict[str, str]:
    """Return what decides which kernels compute on this machine, by name: where all of it is equal, so are all bits."""
    import onnxruntime as ort

    return {
        "processor": processor(),
        "instruction set": instruction_set(),
        "OUTRIDER_ISA": os.environ.get("OUTRIDER_ISA", ""),
        "version of ONNX Runtime": f"{ort.__version__} ({ort.get_build_info()})",
        "build of outrider's ops": file_sha256(cpu_library()),
    }


def kernels_that_count(manifest: Manifest, backend: str) -> dict[str, str]:
    """Return what of `kernels_here` a plan's tokens may depend on: all of it, or nothing.

    They depend on it where ONNX Runtime multiplies floats on the processor: it has other kernels for other ones. On a
    GPU nothing is known of it.
    """
    if not BACKENDS[backend].on_processor:
        return {}
    probe = manifest.backends[backend].probe
    ops = [] if probe is None else [op.partition(": ") for op in probe.ops.values()]
    ours = all(op.split()[0] in SAME_ON_EVERY_PROCESSOR for engine, _, op in ops if engine == names.TARGET)
    return {} if probe is not None and ours else kernels_here()


def foreign_kernels(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Return in words what this machine has otherwise than another one, None where nothing is known of that one."""
    different = next((key for key in {**there, **here} if there and here.get(key) != there.get(key)), None)
    return None if different is None else f"{different} {here.get(different)!r} instead of {there.get(different)!r}"


def _conditions(plan: Plan, probe: Probe, threads: int) -> dict[str, object]:
    """Return all on which a verdict depends: equal conditions, equal result."""
    return kernels_here() | {
        "probe": next(entry.sha256 for entry in plan.manifest.files if entry.path == probe.file),
        "companies": [ROWS, SHORT],
        "cores": available_cores(),
        "threads": threads,
    }


def _record(conditions: Mapping[str, object]) -> Path:
    """Return the file that is there where a probe passed under these conditions. Raises `RuntimeError` for no home."""
    name = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "probed" / f"{name[:32]}.json"


def _is_remembered(conditions: Mapping[str, object]) -> bool:
    with suppress(OSError, RuntimeError):
        return _record(conditions).is_file()
    return False


def _remember(conditions: Mapping[str, object]) -> None:
    """Write what passed, for a reader; that the file exists is all that counts. Without it the next load probes."""
    with suppress(OSError, RuntimeError):
        record = _record(conditions)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(conditions, indent=1) + "\n", encoding="utf-8")
