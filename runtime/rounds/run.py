"""Run a round's program: before it verifies, a tree that was drafted in place is cut; before it accepts, rules of
requests are applied."""

from __future__ import annotations

from time import perf_counter

from outrider.runtime.drafters.base import clip_draft
from outrider.runtime.drafters.engine import Choose
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.round import Round


def run_round(parts: Parts, round: Round) -> None:
    """Run the pass.

    A tree in place is cut to its request's limits, and to what is worth verifying. A device that records rounds
    launches draft and verification at once: there only limits cut.
    """
    program, clock, tree = round.program, round.clock, round.tree_in_place
    parts.passes += 1
    first = round.placed[0]
    limits = first.sequence.generation.request.limits
    length = parts.drafting.drafters_of(first.sequence).verify_length if parts.step.buckets is None else None
    limited = limits.tokens is not None or limits.depth is not None
    cuts = tree is not None and (limited or length is not None)
    ruled = (
        [each for each in round.placed if each.sequence.generation.rules and each.root >= 0] if program.halts else []
    )
    clock.verified = clock.drafted if tree is None else None
    if not cuts and not ruled:
        program.run()
        return

    def cut() -> None:
        clock.verified = perf_counter()
        if limited:
            _cut(parts, round, lambda parent, scores: clip_draft(parent, scores, limits.tokens, limits.depth))
        if length is not None and tree is not None:
            drafted = first.drafted
            _cut(parts, round, lambda parent, scores: length.choose(parent, scores, first.fed))
            tree.left_out = drafted - first.drafted

    program.run(cut if cuts else None, (lambda: parts.ruled_walk.run(ruled)) if ruled else None)


def _cut(parts: Parts, round: Round, choose: Choose) -> None:
    placed, tree = round.placed[0], round.tree_in_place
    engine = parts.drafting.drafters_of(placed.sequence).engine
    assert engine is not None, "it has drafted in place"
    assert tree is not None
    engine.cut_in_place(parts.step, tree, choose)
    placed.drafted = parts.step.drafted
