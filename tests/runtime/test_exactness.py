"""A plan is probed once on each machine, and refused where a row's bits depend on its company."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import outrider.runtime.__main__
from outrider import Runtime
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.plans.plan import open_plan
from outrider.runtime import exactness
from outrider.runtime.exactness import EVERY, ROWS, SHORT, ProbeResult, differing
from tests.inexact import make_probe_inexact, probe_of_a_product
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


def test_a_plan_is_probed_once_under_the_same_conditions(toy_plan: Path, cache: Path) -> None:
    first, second = load(toy_plan), load(toy_plan)
    assert (first.remembered, second.remembered) == (False, True)
    assert first.ops == second.ops > 4
    assert len(list(cache.iterdir())) == 1


def test_another_machine_and_other_threads_and_versions_are_probed_again(
    toy_plan: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(toy_plan)
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


def test_where_nothing_can_be_remembered_every_load_probes(
    toy_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not load(toy_plan).remembered
    assert not load(toy_plan).remembered


def test_an_inexact_plan_is_refused_by_the_name_of_its_op(plan: Path, cache: Path) -> None:
    make_probe_inexact(plan, OP)
    for _ in range(2):  # a refusal is not remembered
        sentence = refused(plan)
        assert f"a row of {OP} has other bits among 32 rows than among 1, 2" in sentence
        assert 'exactness="unchecked"' in sentence
    assert not cache.exists()


def test_an_inexact_plan_runs_unchecked_and_says_so(plan: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_probe_inexact(plan, OP)
    with caplog.at_level(logging.WARNING, "outrider"):
        loaded = Runtime.load(plan, threads=1, exactness="unchecked")
    assert "drafts and neighbours may change its tokens on this machine" in caplog.text
    assert loaded.probed is None
    assert loaded.generate("import", max_new_tokens=2).token_ids


def test_a_wrong_word_for_exactness_is_refused(toy_plan: Path) -> None:
    with pytest.raises(RequestError, match="exactness is 'fast'; pass one of probed, unchecked"):
        Runtime.load(toy_plan, exactness="fast")  # type: ignore[arg-type]


def test_a_probe_that_cannot_be_run_is_refused(plan: Path, cache: Path) -> None:
    probe = open_plan(plan).manifest.backends[BACKEND].probe
    assert probe is not None
    (plan / probe.file).write_bytes(b"no graph")
    list_again(plan)
    assert "is not an ONNX graph" in refused(plan)


def test_the_command_says_that_it_probed(toy_plan: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(toy_plan), "--prompt", "import", "--max-new-tokens", "2", "--threads", "1"]
    said = "have the same bits alone and among up to 32"
    assert outrider.runtime.__main__.main(command) == 0
    assert said in capsys.readouterr().err
    assert outrider.runtime.__main__.main(command) == 0
    assert said not in capsys.readouterr().err


def test_the_command_refuses_an_inexact_plan_until_it_is_told_not_to(
    plan: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_probe_inexact(plan, OP)
    command = ["generate", str(plan), "--prompt", "import", "--max-new-tokens", "2", "--threads", "1"]
    assert outrider.runtime.__main__.main(command) == 2
    assert OP in capsys.readouterr().err
    assert outrider.runtime.__main__.main([*command, "--exactness", "unchecked"]) == 0


# Running a probe.


def session_of(folder: Path, op: str, **attributes: int) -> ort.InferenceSession:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, names.PROBED, 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attributes)], "probe", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "probe.onnx"
    )
    return ort.InferenceSession(str(folder / "probe.onnx"), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("companies", [SHORT, EVERY])
def test_rows_that_stand_alone_never_differ(tmp_path: Path, companies: tuple[tuple[int, int], ...]) -> None:
    assert differing(session_of(tmp_path, "Softmax", axis=2), companies) == {}


@pytest.mark.parametrize("companies", [SHORT, EVERY])
def test_rows_that_depend_on_each_other_differ_in_every_company(
    tmp_path: Path, companies: tuple[tuple[int, int], ...]
) -> None:
    found = differing(session_of(tmp_path, "Softmax", axis=1), companies)
    assert found == {"y": [stop - start for start, stop in companies]}


def test_one_scale_for_all_rows_is_found_in_short(tmp_path: Path) -> None:
    probe_of_a_product(tmp_path / "probe.onnx")
    session = ort.InferenceSession(str(tmp_path / "probe.onnx"), providers=["CPUExecutionProvider"])
    assert differing(session, SHORT)["y"][:3] == [1, 1, 2]  # more of them may have the largest number of all


def test_companies_are_of_rows_of_the_whole() -> None:
    for companies in (SHORT, EVERY):
        assert all(0 <= start < stop <= ROWS for start, stop in companies)
    assert {stop - start for start, stop in EVERY} == set(range(1, ROWS))


def test_a_graph_without_rows_of_any_size_is_refused(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [names.PROBED, 2**40])
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "probe",
        [x],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [names.PROBED, 2**40])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "p.onnx")
    session = ort.InferenceSession(str(tmp_path / "p.onnx"), providers=["CPUExecutionProvider"])
    with pytest.raises(ValueError, match="larger than any of a probe"):
        differing(session, SHORT)
