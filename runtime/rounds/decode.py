"""A speculative round: plan it, run it, accept, commit."""

from __future__ import annotations

from collections import abc

from outrider.runtime.rounds.accept import accept_round
from outrider.runtime.rounds.commit import commit_round
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.plan import plan_round
from outrider.runtime.rounds.run import run_round
from outrider.runtime.rounds.views import KvView
from outrider.runtime.sequence import CommittedTokens, Sequence


def decode(parts: Parts, sequences: abc.Sequence[Sequence], view: KvView, chunk: int) -> list[CommittedTokens]:
    """Run one round of the sequences over the cache of `view`, with at most `chunk` tokens of prompts; return what each
    of them gets."""
    round = plan_round(parts, sequences, view, chunk)
    run_round(parts, round)
    found = accept_round(parts, round)
    commit_round(parts, round, found)
    return [each for each in found if not each.tentative or each.sequence.generation.request.tentative]
