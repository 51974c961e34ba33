"""Show what a pass has committed: its text, up to a stop string, and the result of a generation that has ended."""

from __future__ import annotations

from outrider.plans.errors import RequestError
from outrider.runtime.generation import FinishReason, Span
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.sequence import CommittedTokens
from outrider.runtime.text.rules import failing_alone


def show(parts: Parts, committed: CommittedTokens) -> Span:
    """Return the text of what was committed, pass by pass."""
    sequence = committed.sequence
    if committed.error is not None:
        return Span([], "", sequence=sequence.id, error=committed.error)
    generation, text = sequence.generation, ""
    request = generation.request
    if committed.tentative:
        text = generation.preview(sequence.tentative) if request.tentative else ""
        return Span(committed.token_ids, text, tentative=True, sequence=sequence.id)
    token_ids, logprobs = committed.token_ids, committed.logprobs
    if token_ids:
        kept, text = generation.show(token_ids, committed.reason, committed.drafted, committed.accepted)
        if kept < len(token_ids):
            token_ids, logprobs = token_ids[:kept], logprobs[:kept]
        if committed.round is not None and request.on_round is not None:
            try:
                with failing_alone("on_round"):
                    request.on_round(committed.round.cut(kept))
            except RequestError as error:
                generation.stopped = True
                return Span([], "", sequence=sequence.id, error=error)
        generation.logprobs += logprobs
        own = generation.stats
        if own.rounds == 1:
            own.ttft_ms, own.first_span = (parts.now() - generation.began) * 1000, own.new_tokens
    else:
        generation.finish_reason = committed.reason
    if generation.finish_reason is None:
        return Span(token_ids, text, logprobs, sequence=sequence.id)
    generation.stopped = True
    text += generation.finish()
    generation.stats.total_ms = (parts.now() - generation.began) * 1000
    result = generation.result()
    if request.remember and result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        parts.drafting.remember(sequence, result.token_ids)
    return Span(token_ids, text, logprobs, sequence=sequence.id, result=result)
