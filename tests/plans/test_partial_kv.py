"""The layout of a partial KV cache, and manifests of plans with one that contradict themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.partial_kv import PartialKv
from outrider.plugins.ops.kv_blocks import blocks_in_reach, candidate_blocks
from tests.plans.damage import BACKEND, Edit, edit, refused
from tests.properties import cheap


@cheap
@given(
    block=st.integers(1, 40),
    sink=st.integers(0, 3),
    retrieval=st.integers(1, 9),
    window=st.integers(1, 5),
    covered=st.integers(0, 3000),
    budget=st.integers(0, 9),
)
def test_the_layout_is_that_of_the_ops(
    block: int, sink: int, retrieval: int, window: int, covered: int, budget: int
) -> None:
    settings = PartialKv(
        block_size=block, n_sink_blocks=sink, n_retrieval_blocks=retrieval, n_window_blocks=window, n_spec_tokens_buf=7
    )
    candidates = candidate_blocks(covered, block, sink, window)
    assert settings.candidates(covered) == candidates
    if settings.pays(covered, budget):
        taken = min(budget, candidates)
        rest = covered - (sink + candidates) * block
        assert window * block <= rest < (window + 1) * block
        assert settings.filled(covered, budget) == (sink + taken) * block + rest
        if budget <= retrieval:
            assert settings.filled(covered, budget) + settings.n_spec_tokens_buf <= settings.largest
    assert settings.largest < settings.capacity(128)
    assert settings.capacity(128) % 128 == 0


@cheap
@given(block=st.integers(1, 40), blocks=st.integers(1, 5), window=st.integers(0, 900), covered=st.integers(0, 3000))
def test_the_least_budget_reaches_a_window_and_one_block_less_does_not(
    block: int, blocks: int, window: int, covered: int
) -> None:
    settings = PartialKv(block_size=block, n_sink_blocks=1, n_window_blocks=blocks, n_spec_tokens_buf=7)
    least = settings.least_budget(window)
    assert least == max(1, blocks_in_reach(window, block, blocks))
    if settings.candidates(covered) > least:  # tokens after the blocks that are missing, and the one that looks
        assert settings.filled(covered, least) - settings.sink + 1 >= window
    assert least == 1 or (least - 1 + blocks) * block + 1 < window


def test_a_partial_kv_cache_pays_after_a_threshold_and_where_it_is_the_shorter_one() -> None:
    settings = PartialKv()
    assert [*settings.model_dump().values()] == [16, 2, 256, 8, 128, 4096, 32, "max", 8, None, "lossless"]
    assert [settings.pays(*each) for each in ((4096, 64), (4097, 64), (4256, 256), (4257, 256))] == [0, 1, 0, 1]


@pytest.fixture
def plan(long_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(long_plan, tmp_path / "plan")


def partial(**settings: int | str) -> Edit:
    return lambda m: m["partial_kv"].update(settings)


def model(name: str, **settings: int | list[int]) -> Edit:
    return lambda m: m["models"][name].update(settings)


def without(name: str) -> tuple[Edit, str]:
    return lambda m: programs(m).pop(name), f"{name!r} is missing"


def programs(m: dict[str, Any]) -> dict[str, Any]:
    return m["backends"][BACKEND]["programs"]


def buffer(m: dict[str, Any], name: str) -> dict[str, Any]:
    return next(b for b in m["backends"][BACKEND]["buffers"] if b["name"] == name)


def bind(program: str, index: int, to: str, *parameters: str) -> Edit:
    """Bind parameters of a stage to another buffer."""

    def change(m: dict[str, Any]) -> None:
        for bound in ("inputs", "outputs"):
            stage = programs(m)[program]["stages"][index][bound]
            stage.update({parameter: to for parameter in parameters if parameter in stage})

    return change


WRONG: dict[str, tuple[Edit, str]] = {
    "a buffer below a step": (partial(n_spec_tokens_buf=8), "does not lie between a step of"),
    "a buffer above a chunk": (partial(n_spec_tokens_buf=17), "and a chunk of 16"),
    "more than the full one": (partial(n_retrieval_blocks=500), "more than the full KV cache has"),
    "another layout than its buffers": (partial(n_retrieval_blocks=4), "partial.selected"),
    "a budget without room": (partial(budget=9), "9 blocks are more than there is room for, 3"),
    "windows of other layers": (
        model("target", layer_windows=[5]), "layer_windows: are of 1 layers, and the model has 3",
    ),
    "a window beyond the context": (model("chain", layer_windows=[160]), "are no part of the context, 160"),
    "blocks that do not reach a window": (
        model("target", layer_windows=[0, 22, 0]), "3 blocks do not reach the 22 tokens that layers see: 4 do",
    ),
    "a budget that does not reach a window": (
        lambda m: [model("target", layer_windows=[0, 17, 0])(m), partial(budget=1)(m)],
        "1 blocks do not reach the 17 tokens that layers see: 2 do",
    ),
    "no such mode": (partial(mode="fast"), "mode"),
    "no refresh": without("refresh"),
    "no plain step over it": without("decode_partial"),
    "no step of a drafter over it": without("speculate_partial.head"),
    "nothing that confirms": without("verify"),
    "a refresh that runs an engine": (
        lambda m: programs(m)["refresh"].update(stages=programs(m)["prefill"]["stages"]), "must be BlockSummary, ",
    ),
    "a refresh that writes the full KV cache": (bind("refresh", 2, "target.bim", "partial_kv"), "target.bim"),
    "a refresh that reads another KV cache": (
        bind("refresh", 2, "partial.kv", "kv"), "PartialKvGather binds 'kv' to 'partial.kv'",
    ),
    "a refresh of another layout": (
        lambda m: programs(m)["refresh"]["stages"][1]["attributes"].update(block_size=2), "other attributes",
    ),
    "plain decoding over it": (
        bind("decode", 1, "partial.k_cache.0", "k_cache.0", "k_cache.0_out"), "runs over the KV cache of 'target'",
    ),
    "a small step over the full one": (
        bind("decode_partial", 1, "target.v_cache.1", "v_cache.1", "v_cache.1_out"), "over the KV cache of 'partial'",
    ),
    "the mask of another KV cache": (bind("decode_partial", 0, "target.bim", "bim"), "over the KV cache of 'partial'"),
    "a free size where no KV cache is": (
        lambda m: m["backends"][BACKEND]["engines"]["target"]["inputs"][0].update(shape=[1, 2, "C"]), "is ",
    ),
    "a drafter that writes it": (bind("extend.head", 1, "partial.k_cache.0", "k_cache.0"), "partial"),
    "a short buffer": (lambda m: buffer(m, "partial.key_max").update(shape=[4, 2, 16, 1]), "partial.key_max"),
    "a window below a chunk": (model("head", window=8), "less than a chunk of 16"),
    "no settings": (lambda m: m.update(partial_kv=None), "the program runs over the KV cache of 'target'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_that_is_wrong_is_refused_and_the_place_is_named(plan: Path, case: str) -> None:
    change, named = WRONG[case]
    edit(plan, change)
    assert named in refused(plan)
