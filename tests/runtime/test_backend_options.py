"""How ONNX Runtime uses the cores: a drafter must leave them to the target."""

from __future__ import annotations

import pytest

from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.manifest import Engine
from outrider.plugins.onnxruntime_ops import THREADS
from outrider.runtime.backends.base import Settings
from outrider.runtime.backends.onnxruntime_cpu import CACHED_BYTES, OnnxRuntimeCpu


@pytest.mark.parametrize(
    ("output", "weight_bytes", "threads", "expected", "spinning"),
    [
        (names.LOGITS_OUT, 1, 3, 3, ("session.intra_op.spin_duration_us", "2000")),
        (names.LOGITS_OUT, 1, 0, 0, ("session.intra_op.spin_duration_us", "2000")),
        (names.TREE_TOKEN_IDS, CACHED_BYTES, 3, 1, ("session.force_spinning_stop", "1")),
        (names.TREE_TOKEN_IDS, CACHED_BYTES + 1, 3, 3, ("session.force_spinning_stop", "1")),
    ],
)
def test_threads(output: str, weight_bytes: int, threads: int, expected: int, spinning: tuple[str, str]) -> None:
    outputs = (Tensor(name=output, dtype=DType.FLOAT32, shape=(1,)),)
    engine = Engine(file="engines/x.onnx", inputs=(), outputs=outputs, weight_bytes=weight_bytes)
    options = OnnxRuntimeCpu(Settings(threads))._options(engine)
    assert options.intra_op_num_threads == expected
    assert not expected or options.get_session_config_entry(THREADS) == str(expected)
    assert options.get_session_config_entry(spinning[0]) == spinning[1]
