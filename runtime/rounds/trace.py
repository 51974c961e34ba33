"""The record of a round, for a caller that watches it."""

from __future__ import annotations

from math import exp

import numpy as np

from outrider.plans import names
from outrider.runtime.execution.layout import Placement
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.sequence import CommittedTokens
from outrider.runtime.trace import Node, RoundTrace


def trace_round(parts: Parts, placed: Placement, committed: CommittedTokens) -> RoundTrace:
    """Return the round of one sequence that has just run, with what it commits."""
    ids, step, root, draft = committed.token_ids, parts.step, placed.root, placed.draft
    accepted = np.zeros(0, np.int64) if placed.kept is None else placed.kept[placed.fed :]
    on_path = set(accepted[: min(len(ids), committed.accepted)].tolist())
    by_rejection = placed.sequence.generation.request.drafter in parts.rejecting
    trials = parts.buffers.array(names.TARGET, names.TRIALS) if by_rejection else None  # by logits index
    scores = None if draft is None else draft.scores

    def score(node: int) -> float:
        """Log-probability summed from the tip, which is node 0."""
        assert scores is not None
        return float(scores[node - 1]) if node else 0.0

    nodes = []
    for node in range(1, placed.drafted + 1):
        token = root + node
        parent = int(step.parent[token]) - root
        draw, ratio = (None, None) if trials is None else trials[placed.first + node].tolist()
        weighed = draw is not None and not np.isnan(draw)
        nodes.append(
            Node(
                token_id=int(step.token_ids[token]),
                parent=parent,
                depth=int(step.positions[token] - step.positions[root]),
                probability=None if scores is None else exp(score(node) - score(parent)),
                accepted=token in on_path,
                draw=draw if weighed else None,
                ratio=ratio if weighed else None,
            )
        )
    position = int(step.positions[root]) + 1
    return RoundTrace(position, nodes, ids, 0 if draft is None else draft.left_out)
