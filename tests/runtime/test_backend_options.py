"""How ONNX Runtime is told to use the cores: a drafter must leave them to the target."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.manifest import Engine
from outrider.plugins.onnxruntime_ops import THREADS
from outrider.runtime.backends.base import Settings
from outrider.runtime.backends.onnxruntime_cpu import CACHED_BYTES, OnnxRuntimeCpu


@dataclass(frozen=True)
class Case:
    output: str
    weight_bytes: int
    threads: int
    expected: int
    spins: bool


CASES = {
    "the target": Case(names.LOGITS_OUT, 1, 3, 3, spins=True),
    "the target, by default": Case(names.LOGITS_OUT, 1, 0, 0, spins=True),
    "a small drafter": Case(names.TREE_TOKEN_IDS, CACHED_BYTES, 3, 1, spins=False),
    "a large drafter": Case(names.TREE_TOKEN_IDS, CACHED_BYTES + 1, 3, 3, spins=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_threads(case: Case) -> None:
    outputs = (Tensor(name=case.output, dtype=DType.FLOAT32, shape=(1,)),)
    engine = Engine(file="engines/x.onnx", inputs=(), outputs=outputs, weight_bytes=case.weight_bytes)
    options = OnnxRuntimeCpu(Settings(case.threads))._options(engine)
    assert options.intra_op_num_threads == case.expected
    if case.expected:
        assert options.get_session_config_entry(THREADS) == str(case.expected)
    else:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(THREADS)
    if case.spins:
        assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "2000"
    else:
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"
