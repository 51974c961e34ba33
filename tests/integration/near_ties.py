"""Where runs with drafters part from plain decoding, and by how little the choice was made there (DESIGN section 7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compiler.verify import DrafterCheck, Parting
from plugins.reference import Sampling, choice, uniform
from plugins.reference.choice import filtered_weights
from plugins.schemas import FilterOrder, Purpose
from runtime import Session
from runtime.request import Options, check_options


def margin(logits: NDArray[np.float32], sampling: Sampling, u: int) -> float:
    """How nearly another token would have been chosen from distinct `logits` `[V]` by the uniform number u / 2**53.

    In logits: twice the least disturbance that changes the choice or the set it is made from. Greedily, that is the
    gap of the two largest.
    """
    ranked = np.sort(logits.astype(np.float64))[::-1]
    if sampling.temperature == 0.0:
        return float(ranked[0] - ranked[1])
    weights = filtered_weights(logits, sampling).astype(np.float64)
    found = _to_the_ends((u + 0.5) / (2**53 - u - 0.5), weights, choice(logits, sampling, u), sampling.temperature)
    kept = sampling.top_k if 0 < sampling.top_k < len(ranked) else len(ranked)
    if sampling.top_p < 1.0:
        temperature = 1.0 if sampling.filter_order == FilterOrder.TEMPERATURE_LAST else sampling.temperature
        weights = np.exp((ranked[:kept] - ranked[0]) / temperature)
        sums = np.cumsum(weights)
        kept = 1 + int(np.argmax(sums >= sampling.top_p * sums[-1]))
        found += _to_the_ends(sampling.top_p / (1 - sampling.top_p), weights, kept - 1, temperature)
    found += [ranked[kept - 1] - dropped for dropped in ranked[kept : kept + 1]]
    return float(min(found))


def _to_the_ends(odds: float, weights: NDArray[np.float64], index: int, temperature: float) -> list[float]:
    """From a share of all weights, given by its odds, to the ends of the interval of `index`, in which it lies.

    A share moves most where the logits inside rise and those outside fall: its log-odds by both together, over the
    temperature.
    """
    sums = np.cumsum(weights)
    ends = sums[max(index - 1, 0) : index + 1]
    with np.errstate(divide="ignore"):  # no disturbance moves the end of all
        return list(temperature * np.abs(np.log(ends / (sums[-1] - ends)) - np.log(odds)))


def compare_drafters(
    session: Session, prompts: Sequence[list[int]], drafters: Sequence[str], options: Options, tolerance: float
) -> dict[str, DrafterCheck]:
    """Run every prompt plainly and with each drafter; a `Parting` is a near tie where its `margin` is in tolerance."""
    checks = {name: DrafterCheck() for name in drafters}
    params = check_options(options, drafters, ()).sampling
    sampling = Sampling(params.temperature, params.top_k, params.top_p, FilterOrder[params.filter_order.upper()])
    always = options | Options(ignore_eos=True, auto_disable=False)
    for prompt, ids in enumerate(prompts):
        plain = session.generate(ids, whole=True, drafter="none", **always).token_ids
        for name, check in checks.items():
            run = session.generate(ids, whole=True, drafter=name, **always)
            check.tokens += len(run.token_ids)
            check.rounds += run.stats.rounds
            parted = (i for i, pair in enumerate(zip(plain, run.token_ids, strict=True)) if len(set(pair)) > 1)
            if (index := next(parted, None)) is None:
                check.equal_runs += 1
                continue
            session.generate(ids, whole=True, drafter="none", **always | Options(max_new_tokens=index + 1))
            logits, u = session.step_logits(0), uniform(params.seed, params.stream, len(ids) + index, Purpose.TARGET)
            assert choice(logits, sampling, u) == plain[index]
            apart = margin(logits, sampling, u)
            parting = Parting(prompt, index, plain[index], run.token_ids[index], apart, apart <= tolerance)
            check.partings.append(parting)
    return checks
