"""On the CPU a token's logits are the same bits with any tokens computed beside it, and wherever its keys lie.

Speculation, chunked prefill and continued sessions stand on this: equal bits, equal choices.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.buffers import DType
from outrider.plans.plan import open_plan
from outrider.plugins.ops.bim_mask import bim_mask
from outrider.runtime.backends.base import LoadedEngine, Settings
from outrider.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.step import TargetStep
from tests.compiler.steps import depths

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
        return self._logits(past, n, view)

    def _logits(self, past: int, n: int, view: int) -> Logits:
        self.step.logit_indices[:n] = np.arange(n)
        bim, splits = np.full((1, past), -1, np.int64), np.array([0, n])
        bias = bim_mask(bim, np.array([past]), splits, self.step.branch[:n], self.step.parent[:n], view, n)
        self.buffers.array(names.TARGET, names.ATTN_BIAS).reshape(-1)[: bias.size] = bias.reshape(-1)
        self.run([n, view, n, 1, 2, n, n, 1, 1])
        logits = self.buffers.array(names.TARGET, names.LOGITS_OUT)
        return logits.reshape(-1)[: n * self.vocabulary].reshape(n, -1).copy()

    def tree(self, past: int, tokens: list[int], parents: list[int]) -> Logits:
        """Logits of a tree after the first `past` of `TOKENS`, which are there."""
        step, n = self.step, len(tokens)
        step.begin(past, past, tokens, 0)
        step.parent[:n], step.positions[:n] = parents, depths(parents, past)
        return self._logits(past, n, past + n)

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
    found = feeder.chunks([1])
    assert len(np.unique(found[:, 0])) == len(TOKENS), "the oracle distinguishes tokens"
    return found


def assert_same_bits(found: Logits, wanted: Logits) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=12), view=st.none() | st.integers(len(TOKENS), 256))
@example(sizes=[2], view=None)
@example(sizes=[3], view=49)
@example(sizes=[5], view=127)
@example(sizes=[16], view=None)
@example(sizes=[16], view=128)
@example(sizes=[1], view=256)
def test_chunks_of_any_size_under_any_view_give_the_same_bits(
    feeder: Feeder, one_by_one: Logits, sizes: list[int], view: int | None
) -> None:
    assert_same_bits(feeder.chunks(sizes, view), one_by_one)


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
        assert_same_bits(whole[node], alone[-1])


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_change_a_bit(toy_plan, one_by_one: Logits, threads: int) -> None:
    plan = open_plan(toy_plan, verify=False)
    engine = plan.manifest.backends["onnxruntime-cpu"].engines["target"]
    other = Feeder(toy_plan, OnnxRuntimeCpu(Settings(threads)).load(plan.file(engine.file), engine))
    for size in (1, 16):
        assert_same_bits(other.chunks([size]), one_by_one)


@pytest.mark.parametrize("garbage", [1e30, -1e30, 1e38, np.inf, np.nan, 0.0])
def test_garbage_in_the_kv_cache_after_the_tail_changes_no_bit(
    feeder: Feeder, one_by_one: Logits, garbage: float
) -> None:
    """Rejected drafts leave it there."""
    kv = feeder.buffers.array(names.TARGET, names.KV)
    assert kv.dtype == DType.FLOAT32.numpy
    kv.fill(garbage)
    found = feeder.chunks([5], 128)
    kv.fill(0)
    assert_same_bits(found, one_by_one)
