"""A plan is probed once on each machine, and refused where a row's bits depend on its company."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import outrider.runtime.__main__
from outrider import Runtime
from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.manifest import Engine
from outrider.plans.plan import open_plan
from outrider.plugins.onnxruntime_ops import THREADS
from outrider.runtime import exactness
from outrider.runtime.backends.base import Settings
from outrider.runtime.backends.onnxruntime_cpu import CACHED_BYTES, OnnxRuntimeCpu
from outrider.runtime.exactness import EVERY, SHORT, ProbeResult, differing
from tests.inexact import make_probe_inexact
from tests.plans.damage import BACKEND, list_again, refused

OP = "target: MatMul [32, 128]"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache folder that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider" / "probed"


@pytest.fixture
def plan(toy_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_plan, tmp_path / "plan")


def load(plan: Path, threads: int = 1) -> ProbeResult:
    probed = Runtime.load(plan, threads=threads).probed
    assert probed is not None
    return probed


def test_a_plan_is_probed_once_under_the_same_conditions(
    toy_plan: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = load(toy_plan), load(toy_plan)
    assert (first.remembered, second.remembered) == (False, True)
    assert first.ops == second.ops > 4
    assert not load(toy_plan, threads=2).remembered
    monkeypatch.setenv("OUTRIDER_ISA", "plain")
    assert not load(toy_plan).remembered
    monkeypatch.delenv("OUTRIDER_ISA")
    for name in ("processor", "instruction_set"):
        with monkeypatch.context() as patch:
            patch.setattr(exactness, name, lambda: "another")
            assert not load(toy_plan).remembered
            assert load(toy_plan).remembered
    monkeypatch.setattr("onnxruntime.__version__", "0.1")
    assert not load(toy_plan).remembered
    assert len(list(cache.iterdir())) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(cache.iterdir())))  # where nothing can be written
    assert [load(toy_plan).remembered for _ in range(2)] == [False, False]


def test_an_inexact_plan_is_refused_by_the_name_of_its_op(plan: Path, cache: Path) -> None:
    make_probe_inexact(plan, OP)
    for _ in range(2):  # a refusal is not remembered
        sentence = refused(plan)
        assert f"a row of {OP} has other bits among 32 rows than among 1, 2" in sentence
        assert 'exactness="unchecked"' in sentence
    assert not cache.exists()


def test_a_probe_that_cannot_be_run_is_refused(plan: Path, cache: Path) -> None:
    probe = open_plan(plan).manifest.backends[BACKEND].probe
    assert probe is not None
    (plan / probe.file).write_bytes(b"no graph")
    list_again(plan)
    assert "is not an ONNX graph" in refused(plan)


def test_the_command_probes_once_and_refuses_an_inexact_plan_unless_unchecked(
    plan: Path, cache: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    command = ["generate", str(plan), "--prompt", "import", "--max-new-tokens", "2", "--threads", "1"]
    said = "have the same bits alone and among up to 32"
    for expected in (True, False):
        assert outrider.runtime.__main__.main(command) == 0
        assert (said in capsys.readouterr().err) == expected
    make_probe_inexact(plan, OP)
    assert outrider.runtime.__main__.main(command) == 2
    assert OP in capsys.readouterr().err
    assert outrider.runtime.__main__.main([*command, "--exactness", "unchecked"]) == 0
    assert "drafts and neighbours may change its tokens" in caplog.text


@pytest.mark.parametrize(
    ("output", "weight_bytes", "threads", "expected", "spinning"),
    [
        (names.LOGITS_OUT, 1, 3, 3, ("intra_op.spin_duration_us", "2000")),
        (names.LOGITS_OUT, 1, 0, 0, ("intra_op.spin_duration_us", "2000")),
        (names.TREE_TOKEN_IDS, CACHED_BYTES, 3, 1, ("force_spinning_stop", "1")),
        (names.TREE_TOKEN_IDS, CACHED_BYTES + 1, 3, 3, ("force_spinning_stop", "1")),
    ],
)
def test_drafters_leave_the_cores_to_the_target(
    output: str, weight_bytes: int, threads: int, expected: int, spinning: tuple[str, str]
) -> None:
    outputs = (Tensor(name=output, dtype=DType.FLOAT32, shape=(1,)),)
    engine = Engine(file="engines/x.onnx", inputs=(), outputs=outputs, weight_bytes=weight_bytes)
    options = OnnxRuntimeCpu(Settings(threads))._options(engine)
    assert options.intra_op_num_threads == expected
    assert not expected or options.get_session_config_entry(THREADS) == str(expected)
    assert options.get_session_config_entry(f"session.{spinning[0]}") == spinning[1]


# Running a probe.


def session_of(folder: Path, op: str, width: int = 8, **attributes: int) -> ort.InferenceSession:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, names.PROBED, width]) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attributes)], "probe", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "probe.onnx"
    )
    return ort.InferenceSession(str(folder / "probe.onnx"), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("companies", [SHORT, EVERY])
def test_rows_that_depend_on_each_other_differ_in_every_company(
    tmp_path: Path, companies: tuple[tuple[int, int], ...]
) -> None:
    assert differing(session_of(tmp_path, "Softmax", axis=2), companies) == {}  # rows that stand alone
    found = differing(session_of(tmp_path, "Softmax", axis=1), companies)
    assert found == {"y": [stop - start for start, stop in companies]}


def test_a_graph_without_rows_of_any_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger than any of a probe"):
        differing(session_of(tmp_path, "Relu", 2**40), SHORT)
