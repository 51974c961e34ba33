"""Whether a row has the same bits in any company on this machine: every op of a plan by itself, and its whole target.

What loading a plan probes in short (`runtime/exactness.py`), with all shapes, all numbers of rows, and other threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from outrider import Session
from outrider.compiler.probes.choice import ProbedOp, probed_ops
from outrider.compiler.probes.graph import probe_graph
from outrider.plans.errors import PlanError
from outrider.plans.machine import instruction_set, processor
from outrider.plans.manifest import deciding_engines
from outrider.plans.plan import Plan
from outrider.runtime.backends.onnxruntime_cpu import session_options
from outrider.runtime.exactness import EVERY, ROWS, differing

THREADS = (0, 1, 2, 3)
"""Numbers of threads that ops are probed on; 0: the backend's own choice."""

_WEIGHTS = 2**25
"""Weights, about, of the ops that are in memory at once."""


@dataclass(frozen=True)
class InexactOp:
    """An op of which a row has other bits among `rows` rows than among 32, on `threads` threads.

    It `decides` where tokens depend on it: in the target, and in drafters that are accepted by rejection.
    """

    op: str
    threads: int
    rows: list[int]
    decides: bool


@dataclass
class ExactnessCheck:
    """What was probed on which machine: `ops` of all engines, and chunks of 1 to 32 tokens and of `largest_chunk`.

    `inexact_chunks` are the chunks whose last token has other logits than in a chunk of one.
    """

    processor: str = field(default_factory=processor)
    instruction_set: str = field(default_factory=instruction_set)
    onnxruntime: str = ort.__version__
    ops: int = 0
    inexact_ops: list[InexactOp] = field(default_factory=list)
    largest_chunk: int = 0
    inexact_chunks: list[int] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.inexact_chunks and not any(op.decides for op in self.inexact_ops)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


def check_ops(plan: Plan, backend: str) -> ExactnessCheck:
    """Probe every op of the engines of `backend` with its own weights, on `THREADS`.

    Raises `PlanError` for an engine with an op of which the compiler does not know whether its rows stand alone.
    """
    decide = deciding_engines(plan.manifest.drafters)
    engines = plan.manifest.backends[backend].engines
    order = sorted(engines, key=lambda name: name not in decide)  # an op that several have counts as the first one's
    paths = {name: plan.file(engines[name].file) for name in order}
    try:
        ops = probed_ops({name: ir.load(path) for name, path in paths.items()})
    except ValueError as error:
        raise PlanError(f"{plan.root}: {error}; build the plan again with this version of outrider") from None
    check = ExactnessCheck(ops=len(ops))
    for batch in _batches(ops):
        for threads in THREADS:
            for op, rows in _inexact(batch, threads, paths[batch[0].engine].parent):
                check.inexact_ops.append(InexactOp(op.text, threads, rows, op.engine in decide))
    return check


def check_chunks(session: Session, ids: Sequence[int], check: ExactnessCheck) -> None:
    """Compute the last token of `ids` in chunks of 1 to 32 tokens, and in the plan's largest, as far as `ids` goes.

    Its logits in each are compared with those in the first.
    """
    check.largest_chunk = min(session.manifest.target.prefill_chunk, len(ids))
    alone: np.ndarray | None = None
    session.reset()
    session.generate(ids[:-1], max_new_tokens=1, drafter="none", partial_kv="off", ignore_eos=True)
    for size in sorted({*range(1, min(ROWS, check.largest_chunk) + 1), check.largest_chunk}):
        session.truncate(len(ids) - size)
        session.generate(ids[len(ids) - size :], max_new_tokens=1, drafter="none", partial_kv="off", ignore_eos=True)
        logits = session.step_logits(0).copy()
        alone = logits if alone is None else alone
        if not np.array_equal(logits.view(np.uint32), alone.view(np.uint32)):
            check.inexact_chunks.append(size)


def _batches(ops: Iterable[ProbedOp]) -> Iterator[list[ProbedOp]]:
    batch: list[ProbedOp] = []
    weights = 0
    for op in ops:
        batch.append(op)
        weights += op.width * op.columns
        if weights > _WEIGHTS:
            yield batch
            batch, weights = [], 0
    if batch:
        yield batch


def _inexact(ops: Sequence[ProbedOp], threads: int, folder: Path) -> Iterator[tuple[ProbedOp, list[int]]]:
    """Probe ops whose weights lie in `folder`; yield each that is not exact, and among how many rows."""
    model, outputs = probe_graph(ops)
    options = session_options(threads)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    proto = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    found = differing(session, EVERY)
    for op in ops:
        rows = {size for output, sizes in found.items() if outputs[output] is op for size in sizes}
        if rows:
            yield op, sorted(rows)
