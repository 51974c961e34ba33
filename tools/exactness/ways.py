"""How the requests of a condition are made of our engine: alone, in company, as branches, in sessions, interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime import Generation, Handle, Runtime
from runtime.generation import FinishReason
from tools.exactness.asked import Asked
from tools.exactness.conditions import Condition
from tools.exactness.outcome import Logprob, Outcome


@dataclass
class Witness:
    """Counts that show that a condition was what it says: tokens that drafts brought, that were reused, that requests
    went on behind, and the target's passes, over all tokens."""

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

    def options(self, index: int, asked: Asked, shift: int = 0) -> dict[str, Any]:
        """Options of request `index`: with its drafter, or the one `shift` places behind that."""
        drafter = self.condition.drafter
        if drafter == "mixed":
            drafter = self.drafters[(index + shift) % len(self.drafters)]
        own = {"drafter": drafter, "auto_disable": False, **asked.options, **self.condition.options}
        if "partial_kv" in own and _has_rules(asked.options):
            del own["partial_kv"]
        return own

    def outcome(self, found: Generation) -> Outcome:
        """Take a generation down, and count it."""
        self.witness.see(found)
        return outcome_of(found)


def outcome_of(found: Generation) -> Outcome:
    """Return what there is to compare of a generation."""
    logprobs = tuple(Logprob(each.token_id, each.logprob, tuple(each.top)) for each in found.logprobs)
    ids = tuple(found.token_ids)
    return Outcome(ids, found.text, found.finish_reason.value, logprobs, len(ids) - len(logprobs) if logprobs else 0)


def alone(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """One request after another, each on a sequence of its own."""
    found = []
    for index, each in enumerate(asked):
        _prepare(run, each)
        found.append(run.outcome(_count(run, run.runtime.generate(each.prompt, **run.options(index, each)))))
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
    drafter = run.options(0, asked)["drafter"]
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
        for index, each in enumerate(asked):
            own, middle = run.options(index, each), len(each.prompt) // 2
            cut = middle if index % 2 else len(each.prompt) - 1
            begun = each.prompt[: cut if index % 2 else None]
            open_session.reset()
            open_session.generate(begun, max_new_tokens=6, ignore_eos=True, temperature=1.0, drafter=own["drafter"])
            open_session.truncate(cut)
            found.append(run.outcome(_count(run, open_session.generate(each.prompt[cut:], **own))))
    return found


def branches(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """All requests of a prompt as branches behind its first half."""
    found: dict[int, Outcome] = {}
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, each in enumerate(asked):
        by_prompt.setdefault(tuple(each.prompt), []).append(index)
    assert run.condition.mode is not None
    for prompt, places in by_prompt.items():
        half = len(prompt) // 2
        beginnings = [
            {"prompt": list(prompt[half:]), "stream_id": 0, **run.options(index, asked[index])} for index in places
        ]
        stream = run.runtime.stream_branches(
            list(prompt[:half]), beginnings, mode=run.condition.mode, max_parallel=run.condition.at_once
        )
        for index, result in zip(places, stream.results, strict=True):
            found[index] = run.outcome(result)
        run.witness.passes += stream.stats.rounds
    return [found[index] for index in range(len(asked))]


def company(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """All requests submitted, to share passes."""
    before = run.runtime.scheduler_stats.rounds
    if run.condition.cache == "warm":
        for index, each in enumerate(asked):
            drafter = run.options(index, each)["drafter"]
            run.runtime.generate(each.prompt, max_new_tokens=2, ignore_eos=True, drafter=drafter)
    order, draw = _order(run, len(asked))
    handles: dict[int, Handle] = {}
    for index in order:
        handles[index] = run.runtime.submit(asked[index].prompt, **run.options(index, asked[index]))
        if draw is not None:
            _wait_for(handles[index], draw.randrange(8))
    found = [run.outcome(handles[index].result()) for index in range(len(asked))]
    run.witness.passes += run.runtime.scheduler_stats.rounds - before
    return found


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
    """Each left in the middle of its stream, and gone on behind what it had given, with another drafter."""
    found = []
    for index, each in enumerate(asked):
        stream = run.runtime.stream(each.prompt, **run.options(index, each))
        given, whole = list[int](), None
        for span in stream:
            given, whole = [*given, *span.token_ids], span.result
            if len(given) > index % 7:
                break
        stream.close()
        found.append(run.outcome(_count(run, whole or _go_on(run, index, each, given).result())))
    return found


def cancelled(run: Run, asked: Sequence[Asked]) -> list[Outcome]:
    """All submitted, each cancelled after some tokens, and all gone on together, with other drafters."""
    before = run.runtime.scheduler_stats.rounds
    order, draw = _order(run, len(asked))
    assert draw is not None
    handles = {index: run.runtime.submit(asked[index].prompt, **run.options(index, asked[index])) for index in order}
    for handle in handles.values():
        _wait_for(handle, 1 + draw.randrange(9))
        handle.cancel()
    first = {index: handle.result() for index, handle in handles.items()}
    for index, result in first.items():
        if result.finish_reason is FinishReason.CANCELLED:
            handles[index] = _go_on(run, index, asked[index], result.token_ids)
    found = [run.outcome(handles[index].result()) for index in range(len(asked))]
    run.witness.passes += run.runtime.scheduler_stats.rounds - before
    return found


def _go_on(run: Run, index: int, asked: Asked, given: list[int]) -> Handle:
    return run.runtime.submit(asked.prompt, **run.options(index, asked, shift=1), generated=given)


def _has_rules(options: dict[str, Any]) -> bool:
    """Whether options change logits, which goes with full KV alone."""
    return any(name in options for name in ("structured_outputs", "bad_words", "min_tokens", "repetition_penalty"))


Way = Callable[[Run, Sequence[Asked]], list[Outcome]]
WAYS: dict[str, Way] = {way.__name__: way for way in (alone, session, branches, company, interrupted, cancelled)}
"""How the requests of a condition are made, by `Condition.way`."""
