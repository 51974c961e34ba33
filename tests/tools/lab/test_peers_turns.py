"""Modes of several engines run in turn; what fails is listed with its reason, and everything else continues."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.tools.lab.peers import measure, process
from outrider.tools.lab.peers.engine import GENAI, OURS, TRANSFORMERS, Generated
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


def failing(failing: str, error: WorkerError, at: int = 1) -> Callable[[str, int], None]:
    """Fail in this mode, when it runs for the `at`-th time."""

    def act(mode: str, times: int) -> None:
        if (mode, times) == (failing, at):
            raise error

    return act


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "sleep", lambda seconds: None)


def run(*workers: FakeWorker, prompts: int = 2, reps: int = 2) -> tuple[Turns, list[tuple[str, str]], list[Missing]]:
    """Turns over `prompts` prompts; the modes that are left, and what is missing."""
    missing: list[Missing] = []
    found = Turns(workers, missing)  # type: ignore[arg-type]
    found.run([[prompt] for prompt in range(prompts)], 4, reps)
    return found, [(mode.engine, mode.name) for mode in found.modes], missing


def test_engines_alternate_and_every_second_repetition_has_the_reverse_order() -> None:
    calls: Calls = []
    found, names, missing = run(FakeWorker(OURS, ["none", "ngram"], calls), FakeWorker(GENAI, ["plain"], calls))
    there = [(OURS, "none"), (GENAI, "plain"), (OURS, "ngram")]
    order = [(*mode, prompt) for modes in (there, there[::-1]) for prompt in (0, 1) for mode in modes]
    assert calls == [*((*mode, 0) for mode in there), *order]  # a warm-up that does not count
    assert (names, missing) == ([(OURS, "none"), (OURS, "ngram"), (GENAI, "plain")], [])
    assert all([each.prompt for each in mode.runs] == [0, 1, 0, 1] for mode in found.modes)
    assert [each.generated.total_ms for each in found.modes[2].runs] == [5, 8, 11, 14]  # as it was called


def test_a_mode_that_fails_is_listed_and_all_others_continue() -> None:
    calls: Calls = []
    reason = "onnxruntime-genai (ngram) generated 7 tokens where 12 were asked for"
    peer = FakeWorker(GENAI, ["plain", "ngram"], calls, failing("ngram", WorkerError(reason), at=4))
    found, names, missing = run(FakeWorker(OURS, ["none"], calls), peer)
    assert names == [(OURS, "none"), (GENAI, "plain")]
    assert [len(mode.runs) for mode in found.modes] == [4, 4]
    assert missing == [{"engine": GENAI, "mode": "ngram", "reason": f"prompt 0: {reason}"}]
    assert sum(call[1] == "ngram" for call in calls) == 4
    assert len(report(found.modes, [None, None])["rows"]) == 2


def test_of_our_own_modes_plain_decoding_alone_must_not_fail() -> None:
    fault = WorkerError("a fault")
    _, names, missing = run(FakeWorker(OURS, ["none", "ngram"], [], failing("ngram", fault)), prompts=1)
    assert names == [(OURS, "none")]
    assert missing == [{"engine": OURS, "mode": "ngram", "reason": "prompt 0: a fault"}]
    with pytest.raises(WorkerError, match="outrider, none: prompt 0: a fault"):
        run(FakeWorker(OURS, ["none", "ngram"], [], failing("none", fault)), prompts=1)


def test_an_engine_whose_process_ends_or_does_not_rest_leaves_with_all_its_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mode whose turn it was runs, where another engine is at fault."""
    calls: Calls = []
    reason = "the process of transformers ended: exit status -9"
    lost = FakeWorker(TRANSFORMERS, ["plain", "it"], calls, failing("it", LostEngineError(TRANSFORMERS, reason)))
    found, names, missing = run(FakeWorker(OURS, ["none"], calls), lost, FakeWorker(GENAI, ["plain"], calls), reps=1)
    assert names == [(OURS, "none"), (GENAI, "plain")]
    assert [len(mode.runs) for mode in found.modes] == [2, 2]
    assert [tuple(absent.values()) for absent in missing] == [(TRANSFORMERS, None, reason)]
    assert lost.closed
    calls.clear()
    restless = FakeWorker(GENAI, ["plain"], calls)

    def rest(workers: list[FakeWorker]) -> float:
        if restless in workers and calls:
            raise LostEngineError(GENAI, "the idle process of onnxruntime-genai keeps computing")
        return 0.0

    monkeypatch.setattr(measure, "rest", rest)
    _, names, missing = run(FakeWorker(OURS, ["none", "ngram"], calls), restless, prompts=1, reps=1)
    assert calls == [(OURS, "none", 0), (OURS, "ngram", 0)] * 2  # a warm-up first
    assert names == [(OURS, "none"), (OURS, "ngram")]
    assert [absent["engine"] for absent in missing] == [GENAI]
    assert restless.closed
