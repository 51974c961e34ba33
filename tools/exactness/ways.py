"""How the requests of a condition are made of our engine: alone, in company, as branches, in sessions, interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider import Generation, Handle, Runtime
from outrider.runtime.generation import FinishReason
from outrider.tools.exactness.conditions import Condition
from outrider.tools.exactness.requests import Asked
from outrider.tools.parting import Logprob, Outcome


@dataclass
class Witness:
    """Counts that show that a condition was what it says: tokens that drafts brought, that were reused, that requests
    continued after, and the target's passes, over all tokens."""

    tokens: int = 0
    passes: int = 0
    accepted: int = 0
    reused: int = 0
    resumed: int = 0

    def see(self, found: Generation) -> None:
        """Count what a generation tells of itself."""
        self.tokens += found.stats.new_tokens
        self.accepted += found.stats.accepted
        self.reused += found.stats.reused_tokens
        self.resumed += found.stats.resumed_tokens


@dataclass
class Run:
    """A condition on a loaded plan. `drafters` are those of `MIXED`, which take turns."""

    runtime: Runtime
    condition: Condition
    drafters: Sequence[str]
    witness: Witness = field(default_factory=Witness)

    def options(self, asked: Asked, shift: int = 0) -> dict[str, Any]:
        """Options of a request: with its drafter, or the one `shift` places after that."""
        drafter = self.condition.drafter
        if drafter == "mixed":
            drafter = self.drafters[(asked.turn + shift) % len(self.drafters)]
        own = {"drafter": drafter, "auto_disable": False, **asked.options, **self.condition.options}
        if "partial_kv" in own and _has_rules(asked.options):
            del own["partial_kv"]
        return own

    def outcome(self, found: Generation, asked: Asked) -> Outcome:
        """Take a generation down, and count it."""
        self.witness.see(found)
        return outcome_of(found, asked)


def outcome_of(found: Generation, asked: Asked) -> Outcome:
    """Return what there is to compare of a generation; log-probabilities where they were asked for."""
    logprobs = tuple(Logprob(each.token_id, each.logprob, tuple(each.top)) for each in found.logprobs)
    told = logprobs if "logprobs" in asked.options else None
    reason, behind = found.finish_reason.value, found.stats.resumed_tokens
    return Outcome(tuple(found.token_ids), found.text, reason, told, behind)


def alone(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """One request after another, each on a sequence of its own."""
    found = []
    for each in asked:
        _prepare(run, each)
        found.append(run.outcome(_count(run, run.runtime.generate(each.prompt, **run.options(each))), each))
    return found


def _count(run: Run, found: Generation) -> Generation:
    run.witness.passes += found.stats.rounds
    return found


def _prepare(run: Run, asked: Asked) -> None:
    """Bring the prefix cache into the state that the condition wants before a request."""
    cache = run.runtime.prefix_cache
    if cache is None or run.condition.cache not in ("cold", "shared"):
        return
    shared = 2 * len(asked.prompt) // 3 if run.condition.cache == "shared" else 0
    cache.clear()
    # Also where nothing is shared: an idle engine still has the sequence before, which may begin alike.
    other = _other_than(asked.prompt[shared])
    drafter = run.options(asked)["drafter"]
    run.runtime.generate([*asked.prompt[:shared], other], max_new_tokens=2, ignore_eos=True, drafter=drafter)
    if not shared:
        cache.clear()


def _other_than(token: int) -> int:
    return token - 1 if token else 1


def session(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """All on one session: by turns a prompt in two parts with something else in between, and a prompt that was
    continued otherwise before."""
    found = []
    with run.runtime.session() as open_session:
        for each in asked:
            own, in_parts = run.options(each), each.in_half(4)
            cut = len(each.prompt) // 2 if in_parts else len(each.prompt) - 1
            begun = each.prompt[: cut if in_parts else None]
            open_session.reset()
            open_session.generate(begun, max_new_tokens=6, ignore_eos=True, temperature=1.0, drafter=own["drafter"])
            open_session.truncate(cut)
            found.append(run.outcome(_count(run, open_session.generate(each.prompt[cut:], **own)), each))
    return found


def branches(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """All requests of a prompt as branches after its first half."""
    found: dict[int, Outcome] = {}
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, each in enumerate(asked):
        by_prompt.setdefault(tuple(each.prompt), []).append(index)
    assert run.condition.mode is not None
    for prompt, places in by_prompt.items():
        half = len(prompt) // 2
        beginnings = [{"prompt": list(prompt[half:]), "stream_id": 0, **run.options(asked[index])} for index in places]
        stream = run.runtime.stream_branches(
            list(prompt[:half]), beginnings, mode=run.condition.mode, max_parallel=run.condition.at_once
        )
        for index, result in zip(places, stream.results, strict=True):
            found[index] = run.outcome(result, asked[index])
        run.witness.passes += stream.stats.rounds
    return [found[index] for index in range(len(asked))]


def company(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """All requests submitted, to share passes."""
    before = run.runtime.scheduler_stats.rounds
    _warm(run, asked)
    order, draw = _order(run, len(asked))
    handles: dict[int, Handle] = {}
    for index in order:
        handles[index] = run.runtime.submit(asked[index].prompt, **run.options(asked[index]))
        if draw is not None:
            _wait_for(handles[index], draw.randrange(8))
    found = [run.outcome(handles[index].result(), asked[index]) for index in range(len(asked))]
    run.witness.passes += run.runtime.scheduler_stats.rounds - before
    return found


def _warm(run: Run, asked: Sequence[Asked]) -> None:
    """Put the prompts into the prefix cache, where the condition wants them there."""
    if run.condition.cache == "warm":
        for each in asked:
            drafter = run.options(each)["drafter"]
            run.runtime.generate(each.prompt, max_new_tokens=2, ignore_eos=True, drafter=drafter)


def _order(run: Run, count: int) -> tuple[Iterable[int], random.Random | None]:
    """The order of arrival, and what draws how long each waits for the one before; None for all at once."""
    if not run.condition.order:
        return range(count), None
    draw = random.Random(run.condition.order)
    return draw.sample(range(count), count), draw


def _wait_for(handle: Handle, tokens: int) -> list[int]:
    """Wait until a request has given so many tokens, or ended; return those that it has given."""
    given = list[int]()
    for span in handle if tokens else ():
        given += span.token_ids
        if len(given) >= tokens:
            break
    return given


def interrupted(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """Each left in the middle of its stream, and continued after what it had given, with another drafter."""
    found = []
    for index, each in enumerate(asked):
        stream = run.runtime.stream(each.prompt, **run.options(each))
        given, whole = list[int](), None
        for span in stream:
            given, whole = [*given, *span.token_ids], span.result
            if len(given) > index % 7:
                break
        stream.close()
        found.append(run.outcome(_count(run, whole or _go_on(run, each, given).result()), each))
    return found


def cancelled(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """All submitted, each cancelled after some tokens, and all continued together, with other drafters."""
    before = run.runtime.scheduler_stats.rounds
    _warm(run, asked)
    order, draw = _order(run, len(asked))
    assert draw is not None
    handles = {index: run.runtime.submit(asked[index].prompt, **run.options(asked[index])) for index in order}
    for handle in handles.values():
        _wait_for(handle, 1 + draw.randrange(9))
        handle.cancel()
    first = {index: handle.result() for index, handle in handles.items()}
    for index, result in first.items():
        if result.finish_reason is FinishReason.CANCELLED:
            handles[index] = _go_on(run, asked[index], result.token_ids)
    found = [run.outcome(handles[index].result(), asked[index]) for index in range(len(asked))]
    run.witness.passes += run.runtime.scheduler_stats.rounds - before
    return found


def _go_on(run: Run, asked: Asked, given: list[int]) -> Handle:
    return run.runtime.submit(asked.prompt, **run.options(asked, shift=1), generated=given)


def _has_rules(options: dict[str, Any]) -> bool:
    """Whether options change logits, which goes with full KV alone."""
    return any(name in options for name in ("structured_outputs", "bad_words", "min_tokens", "repetition_penalty"))


Way = Callable[[Run, Sequence[Asked]], list[Outcome]]
WAYS: dict[str, Way] = {way.__name__: way for way in (alone, session, branches, company, interrupted, cancelled)}
"""How the requests of a condition are made, by `Condition.way`."""
