"""A request with NaN logits ends alone; requests that share its passes get the tokens that they get alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from outrider import Runtime, SchedulerConfig
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import PlanError
from outrider.runtime.branch_request import MODES
from outrider.runtime.drafters.base import Draft
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.options.options import Options
from outrider.runtime.rounds import accept
from outrider.runtime.sampling import TokenLogprob, logprobs
from tests.conftest import made_once
from tests.integration.families import DRAFTERS, TOYS, Toy, write_toy
from tests.integration.test_families_on_device import CACHE, by_graphs, by_kernels

__all__ = ["by_graphs", "by_kernels"]

LARGE = 7  # a token whose embedding overflows when it is multiplied
OPTIONS = Options(
    max_new_tokens=20, ignore_eos=True, auto_disable=False, temperature=0.7, seed=3, logit_bias={LARGE: -100.0}
)
PROMPTS = [[20 + place, *range(30, 50 + place)] for place in range(4)]


@pytest.fixture(scope="module")
def recipe(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def write(out: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            changes = TOYS["granite"].changes | {"tie_word_embeddings": False}
            patch.setitem(TOYS, "overflow", Toy("granite", changes))
            write_toy("overflow", out, toy_recipe.parent / "target")
        weights = safetensors.torch.load_file(out / "target" / "model.safetensors")
        weights["model.embed_tokens.weight"][LARGE] = 2e38  # times 3
        safetensors.torch.save_file(weights, out / "target" / "model.safetensors", {"format": "pt"})

    return made_once(tmp_path_factory, "overflow", write) / "model.yaml"


@pytest.fixture(scope="module")
def plan(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "overflow/plan", lambda out: build(load_recipe(recipe), recipe, out))


@pytest.fixture(scope="module", params=[*MODES, pytest.param("cuda", marks=pytest.mark.long), "tensorrt-rtx"])
def runtime(plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Of the CPU, which reads nothing that it hides, and of an emulated device: our kernels, and graphs with masks."""
    if request.param == "cuda":
        yield request.getfixturevalue("by_kernels")()
    elif request.param == "tensorrt-rtx":
        yield request.getfixturevalue("by_graphs")(request.param)
    else:
        with Runtime.load(plan, threads=1, prefix_cache=CACHE, scheduler=SchedulerConfig(mode=request.param)) as made:
            yield made


@pytest.mark.parametrize("place", [0, 10, -1])
def test_it_ends_alone(runtime: Runtime, place: int) -> None:
    expected = [runtime.generate(each, drafter="none", **OPTIONS).token_ids for each in PROMPTS]
    spoilt = [*PROMPTS[0]]
    spoilt[place] = LARGE
    asked: list[tuple[list[int], Any]] = [
        (each, Options(drafter=drafter) | OPTIONS) for each, drafter in zip(PROMPTS, DRAFTERS, strict=True)
    ]
    for _ in range(2):
        handles = runtime.submit_all([asked[0], (spoilt, asked[1][1]), *asked[1:], (spoilt, asked[0][1])])
        for handle in (handles.pop(), handles.pop(1)):
            with pytest.raises(PlanError, match=r"NaN|not finite"):
                handle.result(60)
        assert [handle.result(60).token_ids for handle in handles] == expected


def test_prompts_that_are_computed_beside_it_are_computed_again(runtime: Runtime) -> None:
    """In chunks, before any sequence has a token that would show the fault; also if the faulty one is cancelled."""
    long = [[20 + place, *range(30, 100)] for place in range(2)]
    expected = [runtime.generate(each, drafter="none", **OPTIONS).token_ids for each in long]
    options = Options(drafter="chain") | OPTIONS
    for cancelled in (False, True):
        spoilt, *handles = runtime.submit_all([([LARGE, *long[0]], options), *((each, options) for each in long)])
        if cancelled:
            spoilt.cancel()
        else:
            with pytest.raises(PlanError, match=r"NaN|not finite"):
                spoilt.result(60)
        assert [handle.result(60).token_ids for handle in handles] == expected
    assert [runtime.generate(each, **options).token_ids for each in long] == expected


def test_infinite_logits_end_a_request_for_log_probabilities_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [runtime.generate(each, drafter="none", **OPTIONS).token_ids for each in PROMPTS]

    def refuse(logits: np.ndarray, token: int, top: int) -> TokenLogprob:
        return logprobs(np.where(np.arange(len(logits)) == token, np.float32(np.inf), logits), token, top)

    monkeypatch.setattr(accept, "logprobs", refuse)
    faulty, *handles = runtime.submit_all(
        [(PROMPTS[0], Options(logprobs=1) | OPTIONS), *((each, OPTIONS) for each in PROMPTS)]
    )
    with pytest.raises(PlanError, match="no distribution: their maximum is inf"):
        faulty.result(60)
    assert [handle.result(60).token_ids for handle in handles] == expected


@pytest.mark.parametrize("together", [False, True])
def test_a_draft_that_is_at_fault_changes_no_token(
    runtime: Runtime, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [runtime.generate(each, drafter="none", **OPTIONS).token_ids for each in PROMPTS]
    monkeypatch.setattr(Drafting, "_host_draft", lambda *given: Draft([LARGE], np.array([-1])))
    asked = Options(drafter="ngram") | OPTIONS
    handles = runtime.submit_all([(each, asked) for each in PROMPTS]) if together else []
    found = [each.result(60) for each in handles] or [runtime.generate(each, **asked) for each in PROMPTS]
    assert [each.token_ids for each in found] == expected


def test_a_session_continues_after_it(runtime: Runtime) -> None:
    session = runtime.session()
    with pytest.raises(PlanError, match="NaN"):
        session.generate([*PROMPTS[0], LARGE], drafter="chain", **OPTIONS)
    session.truncate(len(PROMPTS[0]))
    found = session.generate(PROMPTS[1], drafter="chain", **OPTIONS)
    assert found.token_ids == runtime.generate(PROMPTS[0] + PROMPTS[1], drafter="none", **OPTIONS).token_ids
    session.close()
