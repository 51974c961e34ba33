"""Chains as long as the drafter is sure (EGAG): the rule, and the toy plan's drafter `sure`."""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from outrider import Runtime
from outrider.plans.manifest import EntropyGamma, GraphDrafter
from outrider.runtime.drafters.entropy import ChainLength
from outrider.runtime.trace import Node, RoundTrace

PROMPT = [(37 * i) % 299 + 1 for i in range(30)]


def rule(settings: EntropyGamma, entropies: list[float]) -> list[int]:
    """The definition, clamped again."""
    lengths, ema = [], None
    for entropy in entropies:
        gamma = max(settings.gamma_min, min(int((1 - entropy) * settings.gamma_max), settings.gamma_max))
        if settings.beta > 0:
            ema = gamma if ema is None else settings.beta * ema + (1 - settings.beta) * gamma
            gamma = max(settings.gamma_min, min(round(ema), settings.gamma_max))
        lengths.append(gamma)
    return lengths


@given(
    entropies=st.lists(st.floats(-0.001, 1.001), max_size=30),
    low=st.integers(1, 5),
    more=st.integers(0, 10),
    beta=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_lengths_are_those_of_the_rule(entropies: list[float], low: int, more: int, beta: float) -> None:
    settings = EntropyGamma(gamma_min=low, gamma_max=low + more, beta=beta)
    length = ChainLength(settings)
    assert [length.choose(entropy) for entropy in entropies] == rule(settings, entropies)
    length.reset()
    assert length.choose(float("nan")) == low


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_entropies_and_lengths_of_a_generation(toy: Runtime, toy_recipe: Path, temperature: float) -> None:
    """The entropies are those of the draft model in transformers, and every chain has the rule's length."""
    rounds: list[RoundTrace] = []
    run = toy.generate(
        PROMPT, drafter="sure", max_new_tokens=60, temperature=temperature, ignore_eos=True, auto_disable=False,
        on_round=rounds.append,
    )  # fmt: skip
    drafted = [r for r in rounds if r.nodes]
    entropies = [r.entropy for r in drafted if r.entropy is not None]
    assert len(entropies) == len(drafted) > 10
    settings = next(d for d in toy.manifest.drafters if d.name == "sure")
    assert isinstance(settings, GraphDrafter)
    assert settings.entropy is not None
    end = len(PROMPT) + 60
    wanted = [
        min(gamma, end - r.position - 1)
        for gamma, r in zip(rule(settings.entropy, entropies), drafted, strict=True)
    ]  # fmt: skip
    assert [len(r.nodes) for r in drafted] == wanted
    assert len(set(wanted)) > 1

    model = AutoModelForCausalLM.from_pretrained(toy_recipe.parent / "drafter", dtype=torch.float32)
    with torch.no_grad():
        log_p = model(torch.tensor([PROMPT + run.token_ids])).logits[0].double().log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1) / log(log_p.shape[-1])
    at = [r.position - 1 for r in drafted]
    np.testing.assert_allclose(entropies, expected[at].numpy(), atol=2e-5)  # f32 logits up to 10, summed over 300


def test_its_chains_are_those_of_a_fixed_gamma(toy: Runtime) -> None:
    """Drafted a token a run or all in one graph: the same tokens and probabilities, as far as both go."""
    found: dict[str, dict[int, list[Node]]] = {}
    for drafter in ("chain", "sure"):
        rounds: list[RoundTrace] = []
        toy.generate(PROMPT, drafter=drafter, max_new_tokens=80, ignore_eos=True, auto_disable=False,
                     on_round=rounds.append)  # fmt: skip
        found[drafter] = {r.position: r.nodes for r in rounds}
    both = found["chain"].keys() & found["sure"].keys()
    assert len(both) > 10
    for position in both:
        fixed, free = found["chain"][position], found["sure"][position]
        for one, other in zip(fixed, free, strict=False):
            assert one.token_id == other.token_id
            assert one.probability == pytest.approx(other.probability, abs=1e-5)
