"""`metrics.speculative_decoding` of an answer: how much of what was drafted for it the target accepted.

Names and shapes are vLLM's (its page "Per-Request Acceptance Metrics"), which AIPerf reads: the object stands at the
root of a response, and of a stream in the chunk with the usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from outrider.plans.manifest import Drafter, NgramDrafter
from outrider.runtime.stats import Stats


def longest_path(drafters: Sequence[Drafter], asked: str | None) -> int:
    """Most tokens that lie one after another in a draft of the drafter `asked` for, None being the plan's first.

    0 where none drafts. Of n-grams with a drafter after them, the longer of the two.
    """
    chosen = next((each for each in drafters if not asked or each.name == asked), None)
    if chosen is None:
        return 0
    if not isinstance(chosen, NgramDrafter):
        return chosen.longest_path
    return max(chosen.max_draft, 0 if chosen.otherwise is None else longest_path(drafters, chosen.otherwise))


def speculation(found: Sequence[Stats], longest: int) -> dict[str, Any] | None:
    """The object of an answer whose choices have the statistics `found`, added up; None where nothing was drafted.

    `longest` is the longest path of a draft, 0 where no drafter was asked for. A round that confirms what partial KV
    ran ahead with may accept more: the histogram, whose index is the number of accepted tokens, and `num_spec_tokens`
    go as far.
    """
    histogram = [sum(rounds) for rounds in zip_longest(*(each.rounds_by_accepted for each in found), fillvalue=0)]
    steps = sum(histogram)
    if not steps or not longest:
        return None
    histogram += [0] * (longest + 1 - len(histogram))
    accepted, drafted = sum(each.accepted for each in found), sum(each.drafted for each in found)
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }
