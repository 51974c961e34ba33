"""Modes of several engines run in turn; what fails is listed with its reason, and everything else continues."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable

import pytest

from outrider.tools.lab.peers import measure, process, turns
from outrider.tools.lab.peers.engine import GENAI, LLAMA_CPP, OPENVINO, OURS, TRANSFORMERS, Generated
from outrider.tools.lab.peers.figures import report
from outrider.tools.lab.peers.measure import Missing, Turns
from outrider.tools.lab.peers.process import LostEngineError, WorkerError

Calls = list[tuple[str, str, int]]


class FakeWorker:
    """Generates at once; before it does, `act` may raise. `calls` has engine, mode and prompt of all workers."""

    def __init__(self, engine: str, modes: list[str], calls: Calls, act: Callable[[str, int], None] | None = None):
        self.engine, self.modes, self.missing, self.version = engine, modes, {"c": "needs a draft model"}, "1"
        self.calls, self._act = calls, act or (lambda mode, times: None)
        self.closed = False

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        self.calls.append((self.engine, mode, ids[0]))
        self._act(mode, sum(call[:2] == (self.engine, mode) for call in self.calls))
        return Generated(list(range(new)), 1, 1.0, float(len(self.calls)))

    def cpu_ms(self) -> float:
        assert not self.closed
        return 0.0

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "sleep", lambda seconds: None)


def started(*workers: FakeWorker) -> tuple[Turns, list[Missing]]:
    missing: list[Missing] = []
    return Turns(workers, missing), missing  # type: ignore[arg-type]


def names(found: Turns) -> list[tuple[str, str]]:
    return [(mode.engine, mode.name) for mode in found.modes]


def test_engines_alternate_and_every_second_repetition_goes_the_other_way_round() -> None:
    calls: Calls = []
    found, missing = started(FakeWorker(OURS, ["none", "ngram"], calls), FakeWorker(GENAI, ["plain"], calls))
    found.run([[0], [1]], 4, 2)
    there = [(OURS, "none"), (GENAI, "plain"), (OURS, "ngram")]
    order = [(*mode, prompt) for modes in (there, there[::-1]) for prompt in (0, 1) for mode in modes]
    assert calls == [*((*mode, 0) for mode in there), *order]  # a warm-up that does not count
    assert names(found) == [(OURS, "none"), (OURS, "ngram"), (GENAI, "plain")]
    for mode in found.modes:
        assert [run.prompt for run in mode.runs] == [0, 1, 0, 1]
    assert [run.generated.total_ms for run in found.modes[2].runs] == [5, 8, 11, 14]  # as it was called
    assert missing == []


def test_what_cannot_run_is_listed_and_the_others_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []

    def fail(mode: str, times: int) -> None:
        if mode == "b":
            raise WorkerError("ValueError: another vocabulary")

    def load(engine: str, *_: object) -> FakeWorker:
        if engine != TRANSFORMERS:
            raise WorkerError(f"RuntimeError: no such model for {engine}")
        return FakeWorker(engine, ["a", "b"], calls, fail)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(measure, "_load", load)
    monkeypatch.setattr(measure, "_converted", lambda engine, settings, options, precision: settings)
    missing: list[Missing] = []
    peers = measure._peers(None, Namespace(), "fp32", None, missing)  # type: ignore[arg-type]
    found = Turns([FakeWorker(OURS, ["none"], calls), *peers], missing)  # type: ignore[list-item]
    found.run([[0]], 4, 0)
    assert names(found) == [(OURS, "none"), (TRANSFORMERS, "a")]
    assert [tuple(absent.values()) for absent in missing] == [
        (TRANSFORMERS, "c", "needs a draft model"),
        *((engine, None, f"RuntimeError: no such model for {engine}") for engine in (GENAI, OPENVINO, LLAMA_CPP)),
        (TRANSFORMERS, "b", "prompt 0: ValueError: another vocabulary"),
    ]
    assert all(not mode.runs for mode in found.modes)


def test_a_mode_that_fails_in_the_middle_is_listed_and_all_others_go_on() -> None:
    calls: Calls = []

    def fail(mode: str, times: int) -> None:
        if (mode, times) == ("ngram", 4):
            raise WorkerError("onnxruntime-genai (ngram) generated 7 tokens where 12 were asked for")

    ours, peer = FakeWorker(OURS, ["none"], calls), FakeWorker(GENAI, ["plain", "ngram"], calls, fail)
    found, missing = started(ours, peer)
    found.run([[0], [1]], 4, 2)
    assert names(found) == [(OURS, "none"), (GENAI, "plain")]
    assert [len(mode.runs) for mode in found.modes] == [4, 4]
    reason = "prompt 0: onnxruntime-genai (ngram) generated 7 tokens where 12 were asked for"
    assert missing == [{"engine": GENAI, "mode": "ngram", "reason": reason}]
    assert sum(call[1] == "ngram" for call in calls) == 4
    assert len(report(found.modes, [None, None])["rows"]) == 2


def test_of_our_own_modes_plain_decoding_alone_must_not_fail() -> None:
    def fail(failing: str) -> Callable[[str, int], None]:
        def act(mode: str, times: int) -> None:
            if mode == failing:
                raise WorkerError("a fault")

        return act

    found, missing = started(FakeWorker(OURS, ["none", "ngram"], [], fail("ngram")))
    found.run([[0]], 4, 1)
    assert names(found) == [(OURS, "none")]
    assert missing == [{"engine": OURS, "mode": "ngram", "reason": "prompt 0: a fault"}]
    found, missing = started(FakeWorker(OURS, ["none", "ngram"], [], fail("none")))
    with pytest.raises(WorkerError, match="outrider, none: prompt 0: a fault"):
        found.run([[0]], 4, 1)


def test_an_engine_whose_process_ends_is_listed_with_all_its_modes() -> None:
    calls: Calls = []

    def die(mode: str, times: int) -> None:
        if mode == "assisted":
            raise LostEngineError(TRANSFORMERS, "the process of transformers ended: exit status -9")

    lost = FakeWorker(TRANSFORMERS, ["plain", "assisted"], calls, die)
    found, missing = started(FakeWorker(OURS, ["none"], calls), lost, FakeWorker(GENAI, ["plain"], calls))
    found.run([[0], [1]], 4, 1)
    assert names(found) == [(OURS, "none"), (GENAI, "plain")]
    assert [len(mode.runs) for mode in found.modes] == [2, 2]
    assert [tuple(absent.values()) for absent in missing] == [
        (TRANSFORMERS, None, "the process of transformers ended: exit status -9")
    ]
    assert lost.closed


def test_an_engine_that_does_not_rest_leaves_and_the_mode_whose_turn_it_is_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Calls = []
    restless = FakeWorker(GENAI, ["plain"], calls)

    def rest(workers: list[FakeWorker]) -> float:
        if restless in workers and calls:
            raise LostEngineError(GENAI, "the idle process of onnxruntime-genai keeps computing")
        return 0.0

    monkeypatch.setattr(turns, "rest", rest)
    found, missing = started(FakeWorker(OURS, ["none", "ngram"], calls), restless)
    found.run([[0]], 4, 1)
    assert calls == [(OURS, "none", 0), (OURS, "ngram", 0)] * 2  # a warm-up first
    assert names(found) == [(OURS, "none"), (OURS, "ngram")]
    assert [absent["engine"] for absent in missing] == [GENAI]
    assert restless.closed


def test_transformers_has_no_quantised_weights_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(measure, "_load", lambda engine, *_: FakeWorker(engine, ["plain"], []))
    monkeypatch.setattr(measure, "_converted", lambda engine, settings, options, precision: settings)
    missing: list[Missing] = []
    peers = measure._peers(None, Namespace(), "int8", None, missing)  # type: ignore[arg-type]
    assert [worker.engine for worker in peers] == [GENAI, OPENVINO, LLAMA_CPP]
    assert missing[0]["reason"] == "has no weights in int8 on a CPU by itself"
