"""On the CPU a token's logits are the same bits whatever tokens it is computed with, and wherever its keys lie.

Speculation, chunked prefill and continued sessions stand on this: equal bits, equal choices.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.buffers import DType
from outrider.plans.plan import open_plan
from outrider.plugins.reference import bim_mask
from outrider.runtime.backends.base import LoadedEngine, Settings
from outrider.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.step import TargetStep

TOKENS = [(37 * i) % 299 + 1 for i in range(48)]
Logits = NDArray[np.float32]


class Feeder:
    """The target engine on a session's buffers, fed chains of any length under a view of any length."""

    def __init__(self, toy_plan, engine: LoadedEngine) -> None:
        manifest = open_plan(toy_plan, verify=False).manifest
        plan = manifest.backends["onnxruntime-cpu"]
        # Room for logits of every token of a step, which no plan of one tip needs.
        logits = {names.buffer_name(names.TARGET, name) for name in (names.LOGIT_INDICES, names.LOGITS_OUT)}
        buffers = tuple(
            b.model_copy(update={"shape": (names.NEW, *b.shape[1:])}) if b.name in logits else b for b in plan.buffers
        )
        self.buffers = Buffers(plan.model_copy(update={"buffers": buffers}))
        limits = plan.symbols[names.TARGET]
        self.step = TargetStep(self.buffers, manifest.target, limits)
        forward = next(s for s in plan.programs[names.PREFILL].stages if s.run == "target")
        bound = forward.inputs | forward.outputs
        self.run = engine.bind(self.buffers, bound)
        self.largest_view = limits[names.VIEW]
        self.vocabulary = manifest.target.vocab_size

    def feed(self, tokens: list[int], past: int, view: int) -> Logits:
        """Logits of all of `tokens`, a chain after `past` rows, of which `view` keys are looked at."""
        step, n = self.step, len(tokens)
        step.begin(past, past, tokens, 0)
        step.logit_indices[:n] = np.arange(n)
        bim, past_length = np.full((1, past), -1, np.int64), np.array([past])
        bias = bim_mask(bim, past_length, np.array([0, n]), step.branch[:n], step.parent[:n], view, n)
        return self._logits(bias, n, view)

    def _logits(self, bias: NDArray[np.float32], n: int, view: int) -> Logits:
        self.buffers.array(names.TARGET, names.ATTN_BIAS).reshape(-1)[: bias.size] = bias.reshape(-1)
        self.run([n, view, n, 1, 2, n, n, 1, 1])
        logits = self.buffers.array(names.TARGET, names.LOGITS_OUT)
        return logits.reshape(-1)[: n * self.vocabulary].reshape(n, -1).copy()

    def tree(self, past: int, tokens: list[int], parents: list[int]) -> Logits:
        """Logits of a tree after the first `past` of `TOKENS`, which are there."""
        step, n = self.step, len(tokens)
        depth: list[int] = []
        for parent in parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        step.begin(past, past, tokens, 0)
        step.logit_indices[:n], step.parent[:n], step.positions[:n] = np.arange(n), parents, past + np.array(depth)
        bim, past_length, view = np.full((1, past), -1, np.int64), np.array([past]), past + n
        bias = bim_mask(bim, past_length, np.array([0, n]), step.branch[:n], step.parent[:n], view, n)
        return self._logits(bias, n, view)

    def chunks(self, sizes: list[int], view: int | None = None) -> Logits:
        """Logits of `TOKENS`, fed in chunks of these sizes, the last one repeated to the end."""
        found: list[Logits] = []
        past = 0
        for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
            tokens = TOKENS[past : past + size]
            if not tokens:
                break
            keys = past + len(tokens)
            found.append(self.feed(tokens, past, view or keys))
            past = keys
        return np.concatenate(found)


@pytest.fixture(scope="module")
def feeder(toy_plan) -> Feeder:
    plan = open_plan(toy_plan, verify=False)
    engine = plan.manifest.backends["onnxruntime-cpu"].engines["target"]
    return Feeder(toy_plan, OnnxRuntimeCpu().load(plan.file(engine.file), engine))


@pytest.fixture(scope="module")
def one_by_one(feeder: Feeder) -> Logits:
    return feeder.chunks([1])


def test_the_oracle_distinguishes_tokens(one_by_one: Logits) -> None:
    assert one_by_one.shape == (len(TOKENS), 300)
    assert len(np.unique(one_by_one[:, 0])) == len(TOKENS)


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_chunks_of_any_size_give_the_same_bits_as_one_token_at_a_time(
    feeder: Feeder, one_by_one: Logits, size: int
) -> None:
    np.testing.assert_array_equal(feeder.chunks([size]).view(np.uint32), one_by_one.view(np.uint32))


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("view", [48, 49, 64, 127, 128, 256])
def test_a_view_padded_to_any_length_gives_the_same_bits(
    feeder: Feeder, one_by_one: Logits, size: int, view: int
) -> None:
    assert view <= feeder.largest_view
    np.testing.assert_array_equal(feeder.chunks([size], view).view(np.uint32), one_by_one.view(np.uint32))


@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=12), view=st.sampled_from([None, 64, 100, 256]))
def test_chunks_of_changing_size_give_the_same_bits(
    feeder: Feeder, one_by_one: Logits, sizes: list[int], view: int | None
) -> None:
    np.testing.assert_array_equal(feeder.chunks(sizes, view).view(np.uint32), one_by_one.view(np.uint32))


@given(past=st.integers(1, 20), parents=st.lists(st.integers(-1, 14), min_size=1, max_size=16))
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(feeder: Feeder, past: int, parents: list[int]) -> None:
    """Wherever siblings, uncles and their descendants lie between its ancestors."""
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]
    tokens = [(53 * i) % 299 + 1 for i in range(len(parents))]
    feeder.feed(TOKENS[:past], 0, past)
    whole = feeder.tree(past, tokens, parents)
    for node in {0, len(parents) // 2, len(parents) - 1}:
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = feeder.feed([tokens[i] for i in path], past, past + len(path))
        np.testing.assert_array_equal(whole[node].view(np.uint32), alone[-1].view(np.uint32))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_change_a_bit(toy_plan, one_by_one: Logits, threads: int) -> None:
    plan = open_plan(toy_plan, verify=False)
    engine = plan.manifest.backends["onnxruntime-cpu"].engines["target"]
    other = Feeder(toy_plan, OnnxRuntimeCpu(Settings(threads)).load(plan.file(engine.file), engine))
    for size in (1, 16):
        np.testing.assert_array_equal(other.chunks([size]).view(np.uint32), one_by_one.view(np.uint32))


def test_what_lies_in_the_kv_cache_behind_the_tail_changes_no_bit(feeder: Feeder, one_by_one: Logits) -> None:
    """Rejected drafts leave garbage there."""
    kv = feeder.buffers.array(names.TARGET, names.KV)
    assert kv.dtype == DType.FLOAT32.numpy
    for garbage in (0.0, 1e30, -1e30):
        kv.fill(garbage)
        np.testing.assert_array_equal(feeder.chunks([5], 128).view(np.uint32), one_by_one.view(np.uint32))


@pytest.mark.parametrize("garbage", [1e38, np.inf, np.nan])
def test_garbage_that_overflows_does_not_reach_the_logits(feeder: Feeder, one_by_one: Logits, garbage: float) -> None:
    feeder.buffers.array(names.TARGET, names.KV).fill(garbage)
    found = feeder.chunks([5], 128)
    feeder.buffers.array(names.TARGET, names.KV).fill(0)
    np.testing.assert_array_equal(found.view(np.uint32), one_by_one.view(np.uint32))
