"""Going on after any cut equals never having been cut: every kind of cut, with every drafter, greedy and sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product

import pytest

from outrider import FinishReason, Generation, Runtime, Session
from outrider.runtime.options.options import Options
from tests.conftest import TOY_DRAFTERS

PROMPT = [(37 * i) % 299 + 1 for i in range(50)]  # several chunks
TOKENS = 40
Cut = Callable[[Session, Generation, int, Options], Generation]
"""Generate after PROMPT, and be cut near the token of this index in the whole."""


def limit(session: Session, whole: Generation, at: int, options: Options) -> Generation:
    return session.generate(PROMPT, **options | Options(max_new_tokens=at))


def stop_string(session: Session, whole: Generation, at: int, options: Options) -> Generation:
    return session.generate(PROMPT, **options | Options(stop=[whole.text[at : at + 2]]))


def end_token(session: Session, whole: Generation, at: int, options: Options) -> Generation:
    ends = Options(ignore_eos=False, eos_token_ids=[whole.token_ids[at]])
    return session.generate(PROMPT, **options | ends)


def cancellation(session: Session, whole: Generation, at: int, options: Options) -> Generation:
    cancel, seen = threading.Event(), 0
    stream = session.stream(PROMPT, **options | Options(cancel=cancel))
    for span in stream:
        seen += len(span.token_ids)
        if seen >= at:
            cancel.set()
    return stream.result


@pytest.mark.parametrize("sampling", [Options(), Options(temperature=1.0, top_p=0.9, seed=8)], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (limit, FinishReason.LENGTH),
        (stop_string, FinishReason.STOP),
        (end_token, FinishReason.STOP),
        (cancellation, FinishReason.CANCELLED),
    ],
)
def test_going_on_after_a_cut_equals_never_having_been_cut(
    toy: Runtime, cut: Cut, reason: FinishReason, sampling: Options
) -> None:
    options = Options(max_new_tokens=TOKENS, ignore_eos=True, auto_disable=False) | sampling
    whole = toy.generate(PROMPT, drafter="none", **options)
    session = toy.session()
    for drafter, at in product(TOY_DRAFTERS, (4, 13, 22)):
        session.reset()
        drafted = options | Options(drafter=drafter)
        first = cut(session, whole, at, drafted)
        left = TOKENS - len(first.token_ids)
        assert first.finish_reason is reason
        assert 0 < left < TOKENS
        rest = session.generate(**drafted | Options(max_new_tokens=left))
        assert first.token_ids + rest.token_ids == whole.token_ids, drafter
        assert session.token_ids == PROMPT + whole.token_ids
