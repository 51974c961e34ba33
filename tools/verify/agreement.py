"""Same seed, same tokens: runs of a plan with its drafters against plain decoding, and by how little they part.

DESIGN section 7: where two runs part, the margin says how nearly another token would have been chosen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider import Generation, Session
from outrider.plans.sampling import Sampling
from outrider.plugins.reference import RaceKey
from outrider.plugins.reference.choice import filtered_weights
from outrider.plugins.reference.race import race_times
from outrider.plugins.schema import FilterOrder, Purpose
from outrider.runtime.request import Options, check_options

EXACT = frozenset({"onnxruntime-cpu"})
"""Backends on which a draft's tokens have the very logits of plain decoding."""


@dataclass(frozen=True)
class Parting:
    """The place where a run with a drafter first differs from plain decoding of the same plan.

    `index` counts generated tokens; `margin` is that of plain decoding's choice (logits). On the CPU drafts are
    bit-exact, so that there is never a near tie; elsewhere they may be the last bits away.
    """

    prompt: int
    index: int
    plain_token: int
    drafted_token: int
    margin: float
    near_tie: bool


@dataclass
class DrafterCheck:
    """Results of a drafter on some prompts."""

    tokens: int = 0
    rounds: int = 0
    equal_runs: int = 0
    partings: list[Parting] = field(default_factory=list)

    @property
    def tokens_per_verify(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def passed(self) -> bool:
        return all(parting.near_tie for parting in self.partings)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"tokens_per_verify": self.tokens_per_verify}


def compare_drafters(
    session: Session,
    prompts: Sequence[list[int]],
    drafters: Sequence[str],
    options: Options,
    tolerance: float,
    *,
    exact: bool,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, DrafterCheck]:
    """Run every prompt (token ids) plainly and with each drafter, to the limit of `options`.

    A `Parting` is a near tie where its `margin` is within `tolerance` (logits), and none where the target is `exact`
    (EXACT). Drafters by rejection have nothing to agree with at a temperature.
    `progress` gets the number of prompts done.
    """
    checks = {name: DrafterCheck() for name in drafters}
    always = options | Options(ignore_eos=True, auto_disable=False)

    def run(ids: list[int], drafter: str) -> Generation:
        merged: Options = always | Options(drafter=drafter, partial_kv="off")
        return session.generate(ids, whole=True, **merged)

    for prompt, ids in enumerate(prompts):
        plain = run(ids, "none").token_ids
        for name, check in checks.items():
            drafted = run(ids, name)
            check.tokens += len(drafted.token_ids)
            check.rounds += drafted.stats.rounds
            parted = find_parting(session, ids, options, plain, drafted.token_ids)
            if parted is None:
                check.equal_runs += 1
                continue
            index, apart = parted
            near = not exact and apart <= tolerance
            check.partings.append(Parting(prompt, index, plain[index], drafted.token_ids[index], apart, near))
        progress(prompt + 1)
    return checks


def find_parting(
    session: Session, prompt: Sequence[int], options: Options, plain: Sequence[int], other: Sequence[int]
) -> tuple[int, float] | None:
    """Find where `other` leaves `plain`, as an index of generated tokens, and the margin of the choice there.

    `plain` is what `session`, which is used again for the margin, decodes plainly from `prompt` with `options`. None
    where the two are the same.
    """
    index = next((i for i, pair in enumerate(zip(plain, other, strict=True)) if len(set(pair)) > 1), None)
    if index is None:
        return None
    again: Options = options | Options(drafter="none", partial_kv="off", ignore_eos=True, max_new_tokens=index + 1)
    session.generate(prompt, whole=True, **again)
    params = check_options(again, (), ()).sampling
    key = RaceKey(params.seed, params.stream, len(prompt) + index, Purpose.TARGET)
    return index, margin(session.step_logits(0), params.row, key)


def margin(logits: NDArray[np.float32], sampling: Sampling, key: RaceKey) -> float:
    """How nearly another token would have been chosen from `logits` `[V]` in the race of `key`.

    In logits: twice the least disturbance that changes the choice or the set it is made from. Greedily, that is the
    gap of the two largest; in a race, the gap of the two fastest.
    """
    ranked = np.sort(logits.astype(np.float64))[::-1]
    if sampling.temperature == 0.0:
        return float(ranked[0] - ranked[1]) if len(ranked) > 1 else float("inf")
    times = np.sort(race_times(filtered_weights(logits, sampling), key)[1].astype(np.float64))
    found = [sampling.temperature * np.log(second / times[0]) for second in times[1:2]]
    kept = int(sampling.top_k) if 0 < sampling.top_k < len(ranked) else len(ranked)
    temperature = 1.0 if sampling.filter_order == FilterOrder.TEMPERATURE_LAST else sampling.temperature
    fewer, more = list[float](), list[float]()  # what makes the set smaller, and what lets others in
    if sampling.top_p < 1.0:
        weights = np.exp((ranked[:kept] - ranked[0]) / temperature)
        sums = np.cumsum(weights)
        kept = 1 + int(np.argmax(sums >= sampling.top_p * sums[-1]))
        *fewer, end = _to_the_ends(sampling.top_p / (1 - sampling.top_p), weights, kept - 1, temperature)
        more.append(end)
    more += [ranked[kept - 1] - dropped for dropped in ranked[kept : kept + 1]]
    if sampling.min_p > 0.0:  # who comes in passes both, and who is dropped anyway does not matter
        above = ranked - ranked[0] - temperature * np.log(sampling.min_p)
        found += np.abs(above[1:kept]).tolist()  # the first always passes
        passing = int((above >= 0).sum())
        fewer = fewer if kept <= passing else []
        more = [max(edge, -float(above[kept])) for edge in more] if kept < len(ranked) else []
    return float(min([*found, *fewer, *more], default=float("inf")))


def _to_the_ends(odds: float, weights: NDArray[np.float64], index: int, temperature: float) -> list[float]:
    """From a share of all weights, given by its odds, to the ends of the interval of `index`, in which it lies.

    A share moves most where the logits inside rise and those outside fall: its log-odds by both together, over the
    temperature.
    """
    sums = np.cumsum(weights)
    ends = sums[max(index - 1, 0) : index + 1]
    with np.errstate(divide="ignore"):  # no disturbance moves the end of all
        return list(temperature * np.abs(np.log(ends / (sums[-1] - ends)) - np.log(odds)))
