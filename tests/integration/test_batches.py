"""Steps that give each of several sequences a token: their sizes are few, recorded, and filled up with inert tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from outrider import Runtime
from outrider.plans import names
from outrider.runtime.backends import onnxruntime_cuda
from outrider.runtime.branch_request import MODES
from outrider.runtime.execution.warmup import warm_up
from outrider.runtime.options.options import Options
from tests.conftest import REJECTING, TOY_DRAFTERS
from tests.integration.long_context import prompt
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice, driven

pytest.importorskip("cuda.core")

PREFIX = prompt(3, 20)


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


@pytest.fixture(scope="module")
def recorded(everything_cuda_plan: Path, device: EmulatedDevice) -> Iterator[Runtime]:
    """With ops recorded between engines that record themselves, as ONNX Runtime's do."""
    backend = EmulatedBackend(device, records=True)
    with driven(CUDA, lambda target: backend):
        yield Runtime.load(everything_cuda_plan)


@pytest.fixture(scope="module")
def whole(everything_cuda_plan: Path, device: EmulatedDevice) -> Iterator[Runtime]:
    """With engines recorded among the ops."""
    backend = EmulatedBackend(device, records=True, records_engines=True)
    with driven(CUDA, lambda target: backend):
        yield Runtime.load(everything_cuda_plan)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", [*TOY_DRAFTERS, *REJECTING])
def test_rounds_of_several_sequences_with_drafts_are_recorded(
    whole: Runtime,
    everything: Runtime,
    device: EmulatedDevice,
    mode: str,
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the first ones, which compute prompts, and what moves slots together after a sequence has ended."""
    launched, launch = list[str](), device.launch

    def spy(kernel: str, *values: Any) -> None:
        launched.append(kernel)
        launch(kernel, *values)

    monkeypatch.setattr(device, "launch", spy)
    asked = [
        Options(prompt=[7 + place], max_new_tokens=8 if place == 1 else 24, ignore_eos=True, drafter=drafter,
                temperature=0.9, seed=5, stream_id=place, auto_disable=False)  # type: ignore[typeddict-unknown-key]
        for place in range(5)
    ]  # fmt: skip
    expected = [each.token_ids for each in everything.generate_branches(PREFIX, asked, mode=mode)]
    graphs, rounds = device.graphs, 0
    with closing(whole.stream_branches(PREFIX, asked, mode=mode)) as stream:
        for span in stream:
            if span.sequence == 0:
                rounds += 1
                assert rounds <= 3 or {*launched} <= {"outrider_set_numbers", "outrider_kv_gather"}
                launched.clear()
        found = stream.results
    assert [each.token_ids for each in found] == expected
    assert device.graphs == graphs
    assert rounds > 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sequences", [2, 4])
def test_what_runs_was_recorded(
    recorded: Runtime, everything: Runtime, mode: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = list[str]()
    original = onnxruntime_cuda._run_options
    monkeypatch.setattr(onnxruntime_cuda, "_run_options", lambda graph: plain.append(graph) or original(graph))
    asked = [
        Options(prompt=[7 + place], max_new_tokens=6 if place == 1 else 14, ignore_eos=True, drafter="none",
                temperature=0.9, seed=5, stream_id=place)  # type: ignore[typeddict-unknown-key]
        for place in range(sequences)
    ]  # fmt: skip
    expected = [each.token_ids for each in everything.generate_branches(PREFIX, asked, mode=mode)]
    sizes = set[int]()
    rounds = 0
    with closing(recorded.stream_branches(PREFIX, asked, mode=mode)) as stream:
        for span in stream:
            if rounds > 2 * sequences and span.sequence == 0:
                assert not plain
                sizes.add(recorded.engines.loops[0].target_step.new_tokens)
            rounds += 1
            plain.clear()
        found = [each.token_ids for each in stream.results]
    assert found == expected
    assert sizes <= {1, 2, 4}
    assert rounds > 3 * sequences


def test_recordings_are_as_many_as_sizes_and_views(recorded: Runtime) -> None:
    """In one row and in a row each, and no more where a plan has more branches."""
    loop, programs = recorded.engines.loops[0], defaultdict[str, Mock](Mock)
    buckets, steps = recorded.loaded.plan.buckets, {names.TARGET: loop.target_step, **loop.parts.draft_steps}
    warm_up(loop.manifest.target.context, steps, loop.drafting, programs)  # type: ignore[arg-type]
    runs = {name: program.run.call_count for name, program in programs.items()}
    for model, own in buckets.items():
        drafted = names.VERIFY if model == names.TARGET else names.draft(model)
        alone = len(own.new) if model == names.TARGET else 0
        assert 0 < runs[drafted] <= (2 * len(own.batch) + alone) * len(own.view)


def test_the_plan_says_which_sizes(recorded: Runtime) -> None:
    batches = recorded.loaded.plan.buckets[names.TARGET].batch
    assert [each.tokens for each in batches if each.each == 1] == [2, 4, 8, 16]
