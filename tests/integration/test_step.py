"""What a step costs the host: fixed addresses, no arrays, and only what changed size is bound again."""

from __future__ import annotations

import tracemalloc

import pytest

from outrider import Runtime
from outrider.plans.errors import RequestError
from outrider.runtime.backends import onnxruntime_cpu
from outrider.runtime.options.options import Options

PROMPT = list(range(100, 1100))  # a view of over 1,000 keys: its mask alone is 4.6 kB, its logits 16 kB
SMALL = 4096  # bytes: Python's own objects of a step stay below, any array of the step would not


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_after_warm_up_a_step_allocates_no_array(reference: Runtime, drafter: str) -> None:
    session = reference.session()
    stream = session.stream(PROMPT, max_new_tokens=40, drafter=drafter, ignore_eos=True)
    for _ in range(6):
        next(stream)
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(6):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            next(stream)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        stream.close()
    assert sorted(peaks)[len(peaks) // 2] < SMALL, peaks


def test_buffers_never_move(toy: Runtime) -> None:
    session = toy.session()
    before = {name: array.ctypes.data for name, array in session.buffers.arrays.items()}
    session.generate(list(range(1, 60)), max_new_tokens=30)
    session.reset()
    session.generate(list(range(1, 20)), max_new_tokens=30, temperature=1.0, drafter="none")
    assert {name: array.ctypes.data for name, array in session.buffers.arrays.items()} == before


def test_plain_decoding_binds_again_only_where_the_view_grows(
    reference: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    original = onnxruntime_cpu._Sized.bind

    def counting(self: onnxruntime_cpu._Sized, sizes: list[int]) -> None:
        bound.append(self._name)
        original(self, sizes)

    session = reference.session()
    stream = session.stream(PROMPT[:120], max_new_tokens=60, drafter="none", ignore_eos=True)
    next(stream)
    next(stream)
    monkeypatch.setattr(onnxruntime_cpu._Sized, "bind", counting)
    for _ in stream:
        pass
    assert bound == ["attn_bias"]  # once, where 128 keys become 256


def test_timing_a_round_leaves_the_sequence_as_it_is(toy: Runtime) -> None:
    session, options = toy.session(), Options(max_new_tokens=20, ignore_eos=True, drafter="none")
    prompt = [5, 6, 7]
    expected = toy.generate(prompt, **options | Options(max_new_tokens=40)).token_ids
    first = session.generate(prompt, **options).token_ids
    assert session.time_round([], "none") > 0
    assert session.time_round([1, 2, 3], "ngram") > 0
    assert session.time_round([1, 2, 3], None) > 0  # whoever has drafted it
    assert session.time_round([], None) > 0
    assert first + session.generate(**options).token_ids == expected


@pytest.mark.parametrize(
    ("chain", "drafter", "said"),
    [
        ([1], "head", "engine of its own"),
        ([1], "other", "no drafter 'other'"),
        ([1] * 100, "ngram", "room for a chain of"),
    ],
)
def test_a_round_that_cannot_be_timed_is_refused(toy: Runtime, chain: list[int], drafter: str, said: str) -> None:
    session = toy.session()
    session.generate([5, 6, 7], max_new_tokens=3, drafter="none")
    with pytest.raises(RequestError, match=said):
        session.time_round(chain, drafter)
    with pytest.raises(RequestError, match="tokens, 0 of them with KV"):
        toy.session().time_round([], "none")
