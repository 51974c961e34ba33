"""`acceptance: rejection`: classical speculative sampling draws from the target's distribution, as coupled trees do."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from transformers import Qwen3ForCausalLM

from outrider import Runtime
from outrider.runtime.branch_request import BranchPrompt
from outrider.runtime.cli.debug import RoundPrinter
from outrider.runtime.options.options import Options
from outrider.runtime.options.request import resolve
from outrider.runtime.sequence import Sequence
from outrider.runtime.trace import RoundTrace
from tests.conftest import REJECTING, BuildOnce, drafting_never_pays
from tests.plugins.accept_step import one_in_a_thousand

PROMPT = [(37 * i) % 299 + 1 for i in range(40)]
RUN, TOP_K, CELLS = 100, 12, 40


@pytest.fixture(scope="module")
def oracle(toy_recipe: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(toy_recipe.parent / "target").float()


def test_greedy_rejection_gives_the_tokens_of_plain_decoding(everything: Runtime) -> None:
    """All of p lies on one token: it is accepted or corrected to."""
    options = Options(max_new_tokens=60, ignore_eos=True, auto_disable=False)
    plain = everything.generate(PROMPT, drafter="none", **options).token_ids
    for drafter in REJECTING:
        run = everything.generate(PROMPT, drafter=drafter, **options)
        assert run.token_ids == plain
        assert run.stats.drafted > 0
    assert everything.generate(PROMPT, drafter="classical", **options).stats.accepted > 0


FILTERS = {
    "top-k": Options(temperature=1.0, top_k=TOP_K),
    "top-p": Options(temperature=1.0, top_p=0.5),
    "temperature last": Options(temperature=1.6, top_p=0.6, filter_order="temperature_last"),
}


def target_weights(
    logits: NDArray[np.float64], temperature: float, top_k: int = 0, top_p: float = 1.0, filter_order: str = ""
) -> NDArray[np.float64]:
    """What is drawn from, `[tokens, vocab]`, up to a factor; with top-k or top-p, not both."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    at = np.exp(shifted / (1.0 if filter_order == "temperature_last" else temperature))
    ranked = np.sort(at, axis=1)[:, ::-1]
    kept = np.full(len(logits), top_k or logits.shape[1])
    if top_p < 1:
        kept = 1 + (np.cumsum(ranked, axis=1) < top_p * ranked.sum(axis=1, keepdims=True)).sum(axis=1)
    return np.where(at >= np.take_along_axis(ranked, kept[:, None] - 1, axis=1), np.exp(shifted / temperature), 0.0)


def places(
    everything: Runtime,
    oracle: Qwen3ForCausalLM,
    drafter: str,
    draws: int,
    filters: str = "top-k",
    branches: int = 1,
    **options: Any,
) -> NDArray[np.float64]:
    """Where each of `draws` tokens lies in [0, 1), if the target's distribution at its place is laid out there.

    Likeliest first, and anywhere in the token's own share: uniform if tokens have that distribution, of any shape.
    None may lie outside it. With several `branches`, their seeds are drawn together.
    """
    rng, found = np.random.default_rng(0), []
    sampling = FILTERS[filters]
    asked = Options(drafter=drafter, max_new_tokens=RUN, ignore_eos=True, auto_disable=False, **sampling, **options)  # type: ignore[misc]
    runs: list[list[int]] = []
    for seed in range(0, draws // RUN, branches):
        if branches == 1:
            runs.append(everything.generate(PROMPT, seed=seed, **asked).token_ids)
            continue
        seeds: list[BranchPrompt] = [{"prompt": PROMPT[-1:], "seed": seed + i} for i in range(branches)]
        runs += [each.token_ids for each in everything.generate_branches(PROMPT[:-1], seeds, **asked)]
    for ids in runs:
        with torch.no_grad():
            logits = oracle(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].double().numpy()
        weights = target_weights(logits, **sampling)
        own = np.take_along_axis(weights, np.array(ids)[:, None], axis=1)
        assert (own > 0).all()
        before = np.where(weights > own, weights, 0.0).sum(axis=1)
        found.append((before + rng.random(RUN) * own[:, 0]) / weights.sum(axis=1))
    return np.concatenate(found)


def chi_square(found: NDArray[np.float64]) -> float:
    counts, mean = np.histogram(found, CELLS, (0, 1))[0], len(found) / CELLS
    return float(((counts - mean) ** 2 / mean).sum())


@pytest.mark.parametrize(
    ("drafter", "draws", "filters", "branches"),
    [
        ("bushy", 3_000, "top-k", 1),  # a coupled tree
        ("classical", 2_000, "top-k", 4),
        ("classical", 2_000, "top-p", 1),
        ("classical-head", 2_000, "temperature last", 1),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("classical", 20_000, "top-k", 1),
                ("classical", 10_000, "top-p", 4),
                ("classical", 5_000, "temperature last", 1),
                ("classical-head", 5_000, "top-k", 4),
            )
        ),
    ],
)
def test_tokens_have_the_distribution_of_the_target(
    everything: Runtime, oracle: Qwen3ForCausalLM, drafter: str, draws: int, filters: str, branches: int
) -> None:
    assert chi_square(places(everything, oracle, drafter, draws, filters, branches)) < one_in_a_thousand(CELLS - 1)


@pytest.mark.parametrize("drafter", REJECTING)
def test_tokens_do_not_depend_on_slots_that_neighbours_have_left(everything: Runtime, drafter: str) -> None:
    """A sequence that is alone after them drafts at once, as if it had always been alone."""
    options = Options(max_new_tokens=90, temperature=1.0, seed=11, ignore_eos=True)
    engine = everything.engines.borrow()
    engine.warm_up("in-one-sequence")

    def admit(id: int, prompt: list[int], own: Options) -> Sequence:
        return engine.admit(id, prompt, resolve(own, everything.manifest, everything.grammars))

    found: list[int] = []

    def step(*running: Sequence) -> None:
        for committed in engine.step(running):
            span = engine.show(committed)
            found.extend(span.token_ids if span.sequence == 0 else [])

    view, longest = engine.target_step.largest_view, engine.parts.rejecting[drafter]
    one = admit(0, PROMPT, Options(**{**options, "drafter": drafter}))
    first = admit(1, [*PROMPT, *PROMPT[:15]], Options(max_new_tokens=1, drafter="none"))
    while not first.over:
        step(one, first)
    engine.release(first)
    rest = view - one.generation.end - engine._reserved(one.generation.request)
    second = admit(2, PROMPT * 2, Options(max_new_tokens=rest - 80, drafter="none", ignore_eos=True))
    while engine.cache.length + longest < view:
        assert not second.over
        step(one, second)
    engine.release(second)
    while not one.over:
        step(one)
    engine.release(one)
    everything.engines.give_back(engine)
    assert found == everything.generate(PROMPT, drafter=drafter, **options).token_ids


@pytest.mark.parametrize("drafter", REJECTING)
def test_a_nucleus_of_one_token_is_greedy(everything: Runtime, drafter: str) -> None:
    options = Options(max_new_tokens=60, ignore_eos=True, auto_disable=False, drafter=drafter)
    greedy = everything.generate(PROMPT, temperature=0.0, **options)
    for top_p in (1e-3, 1e-46):
        assert everything.generate(PROMPT, temperature=1.0, top_p=top_p, **options).token_ids == greedy.token_ids


def test_tokens_do_not_depend_on_the_clock(everything: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which draws decide depends on what was drafted, so drafting continues even where it never pays."""
    drafting_never_pays(monkeypatch)
    options = Options(max_new_tokens=100, temperature=1.0, seed=3, ignore_eos=True)
    for drafter in REJECTING:
        kept, free = (everything.generate(PROMPT, drafter=drafter, auto_disable=on, **options) for on in (False, True))
        assert free.token_ids == kept.token_ids
        assert free.stats.plain_rounds == 0


def test_tokens_of_one_branch_have_it_too(built: BuildOnce, oracle: Qwen3ForCausalLM) -> None:
    alone = Runtime.load(built("classical-plan", [f"drafters=[{REJECTING['classical']}]"]), threads=1)
    assert chi_square(places(alone, oracle, "classical", 3_000)) < one_in_a_thousand(CELLS - 1)


@pytest.mark.long  # it takes this number of draws to distinguish the two
def test_without_the_adjustment_they_have_not(everything: Runtime, oracle: Qwen3ForCausalLM) -> None:
    found = places(everything, oracle, "classical", 12_000, skip_sample_adjustment=True)
    assert chi_square(found) > one_in_a_thousand(CELLS - 1)


@pytest.mark.parametrize("drafter", REJECTING)
def test_rounds_have_r_and_p_over_q(everything: Runtime, drafter: str) -> None:
    rounds: list[RoundTrace] = []
    session = everything.session()
    session.generate(PROMPT, drafter=drafter, temperature=1.0, seed=3, max_new_tokens=80, on_round=rounds.append)
    nodes = [node for r in rounds[:-1] for node in r.nodes]  # the last may have been cut
    weighed = [node for node in nodes if node.draw is not None and node.ratio is not None]
    assert all(node.accepted == (node.draw <= node.ratio) for node in weighed)
    assert all(node in weighed for node in nodes if node.accepted)
    for r in rounds[1:-1]:  # the first computes the prompt
        first_rejected = next((i for i, node in enumerate(r.nodes) if not node.accepted), len(r.nodes))
        assert [node.draw is not None for node in r.nodes] == [i <= first_rejected for i in range(len(r.nodes))]
    shown = StringIO()
    RoundPrinter(everything.tokenizer, Console(file=shown, width=1000))(rounds[1])
    assert f"r {rounds[1].nodes[0].draw:.2f} p/q {rounds[1].nodes[0].ratio:.2f}" in shown.getvalue()
