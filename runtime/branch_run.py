"""Generate several sequences after one prefix: how `generate_branches` drives a step loop."""

from __future__ import annotations

from outrider.runtime.branch_request import BranchRequest
from outrider.runtime.generation import FinishReason, Generation, Run, Span
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stats
from outrider.runtime.step_loop import StepLoop

_WAIT = 0.05  # seconds that a beginning which is not known yet is waited for, while nothing runs


def run_branches(loop: StepLoop, call: BranchRequest, stats: Stats) -> Run:
    """Yield the spans of all branches as they are committed. Fills `stats`.

    Branches that are predicted to be longest start first, equal ones in the order given; one whose beginning is not
    known yet starts as soon as it is.
    """
    prefix, asked = call.prefix, call.branches
    with loop.counting(stats):
        owner = asked[0].cache_salt
        if loop.begin(prefix, {each.drafter for each in asked} | set(call.keep_for), call.mode, owner=owner):
            stats.reused_tokens = len(prefix)
        else:
            stats.reused_tokens = stats.cached_tokens = loop.shared.recall()
        for _ in loop.shared.compute():
            if all(each.cancelled for each in asked):
                break
            stats.prefill_passes += 1
        waiting = sorted(enumerate(asked), key=lambda each: -each[1].predicted_tokens)
        ended: dict[int, Generation] = {}
        beginnings = {place: each.token_ids for place, each in waiting if each.late is None}
        running: list[Sequence] = []
        while waiting or running:
            for place, each in [(place, each) for place, each in waiting if each.cancelled]:
                waiting.remove((place, each))
                untouched = Stats(prompt_tokens=len(prefix) + len(each.token_ids))
                result = ended[place] = Generation("", [], FinishReason.CANCELLED, untouched, seed=each.sampling.seed)
                yield Span([], "", sequence=place, result=result)
            for place, each in waiting:
                if place not in beginnings and each.late is not None:
                    idle = not running and not any(place in beginnings for place, _ in waiting)
                    beginning = each.late(ended, _WAIT if idle else 0.0)
                    if beginning is not None:
                        beginnings[place] = beginning
            for place, each in [(place, each) for place, each in waiting if place in beginnings]:
                if len(running) == call.parallel:
                    break
                if running and not loop.fits(len(beginnings[place]), each):
                    break
                waiting.remove((place, each))
                running.append(loop.admit(place, beginnings[place], each))
            if not running:
                continue
            stats.most_alive = max(stats.most_alive, len(running))
            stats.rounds += 1
            for committed in loop.step(running):
                span = loop.show(committed)
                stats.new_tokens += 0 if span.tentative else len(span.token_ids)
                if span.error is not None:
                    raise type(span.error)(f"Branch {span.sequence}: {span.error}") from None
                if span.result is not None:
                    ended[span.sequence] = span.result
                with loop.pausing():
                    yield span
            loop.settle(running)
