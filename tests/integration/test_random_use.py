"""Random use of runtimes, in every way at once: tokens are those of the target alone, after any use."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import Generation, PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.runtime.step_loop import StepLoop
from tests.conftest import REJECTING, TOY_DRAFTERS
from tests.integration.shifting_rule import Shifting

pytestmark = pytest.mark.usefixtures("run_ahead")

CACHES = {
    "no cache": None,
    "large": PrefixCacheConfig(memory_bytes=1 << 21),
    "small": PrefixCacheConfig(memory_bytes=1 << 19, max_cached_tokens=200),
}


@pytest.mark.parametrize("rounds", [40, pytest.param(800, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mode", "cache", "scheduling"),
    [
        ("batching", "no cache", {"overlap": False}),
        ("batching", "large", {"prefill_tokens": 3}),
        ("in-one-sequence", "no cache", {"prefill_tokens": 5}),
        ("in-one-sequence", "small", {}),
    ],
)
def test_tokens_do_not_depend_on_what_was_done_before(
    everything: Runtime, everything_plan: Path, mode: Any, cache: str, scheduling: dict[str, Any], rounds: int
) -> None:
    """The long run explores other uses each time."""
    seed = rounds if rounds == 40 else random.SystemRandom().randrange(10**6)
    own: dict[str, Any] = {"seed": seed, "threads": 1, "cache": CACHES[cache], **scheduling}
    used = expect_the_tokens_of_the_target_alone(everything, everything_plan, mode, rounds, **own)
    assert used.memory().idle == 1


def test_tokens_of_padded_rows(branching: Runtime, branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows padded on the left, slots to the longest row's: for engines that read no ragged rows."""
    shapes = set[tuple[bool, bool]]()

    class PaddedLoop(StepLoop):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, padded=True)
            for program in (self.programs[names.DECODE], self.programs[names.VERIFY]):
                monkeypatch.setattr(program, "run", partial(self.check_step, program.run))

        def check_step(self, run: Callable[..., None], *between: Any) -> None:
            step, rows = self.target_step, self.cache._used
            (width,) = set(np.diff(step.row_splits[: rows + 1]).tolist())
            (past,) = set(step.past_length[:rows].tolist())
            assert self.cache.alignment is not None
            assert self.cache.alignment.cache_length == past
            shapes.add((rows > 1, width > 1))
            run(*between)

    monkeypatch.setattr("outrider.runtime.step_loop_pool.StepLoop", PaddedLoop)
    expect_the_tokens_of_the_target_alone(branching, branch_plan, "batching", 40, seed=1, threads=1, rejecting=())
    assert (True, True) in shapes


VOCAB, CONTEXT = 299, 160
COUPLED = ("none", *TOY_DRAFTERS)
RULES: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logit_bias": {token: token % 7 - 3.0 for token in range(0, VOCAB, 3)}},
    {"bad_words": ["e", "in", "the "]},
    {"allowed_token_ids": list(range(0, VOCAB, 2))},
    {"min_tokens": 1, "logit_bias": {0: 10}},
    {"constraint": Shifting()},
)
LIMITS: tuple[dict[str, Any], ...] = ({"draft_tokens": 1}, {"draft_tokens": 5}, {"draft_depth": 1}, {"draft_depth": 2})


def expect_the_tokens_of_the_target_alone(
    alone: Runtime,
    plan: Path,
    mode: Any,
    rounds: int,
    *,
    seed: int,
    threads: int = 2,
    cache: PrefixCacheConfig | None = None,
    prefill_tokens: int | None = None,
    overlap: bool = True,
    **drafters: Sequence[str],
) -> Runtime:
    """Load the plan again and use it for `rounds`; return the runtime, closed."""
    scheduler = SchedulerConfig(mode=mode, prefill_tokens=prefill_tokens, overlap=overlap)
    used = Runtime.load(plan, threads=threads, prefix_cache=cache, scheduler=scheduler)
    user = RandomUse(alone, used, mode, seed, **drafters)
    user.run(rounds)
    assert user.compared > rounds
    assert user.partial_rounds > 0 or alone.manifest.partial_kv is None or rounds < 40
    assert used.close(timeout=60)
    if used.prefix_cache is not None:
        used.prefix_cache.check()
        assert used.prefix_cache.in_use == 0
    return used


class WatcherError(Exception):
    """Raised by `on_round`."""


class RandomUse:
    """One random user of a runtime, and what its tokens are compared with."""

    def __init__(
        self,
        alone: Runtime,
        used: Runtime,
        mode: Any,
        seed: int,
        coupled: Sequence[str] = COUPLED,
        rejecting: Sequence[str] = tuple(REJECTING),
    ) -> None:
        """`coupled` and `rejecting` are the drafters that the user knows of."""
        self._alone, self._used, self._mode = alone, used, mode
        self._coupled, self._rejecting = coupled, rejecting
        self._partial = alone.manifest.partial_kv is not None
        self._seed, self._random = seed, random.Random(seed)
        self._beginnings = [self._tokens(60) for _ in range(6)]
        self._expected: dict[str, Generation] = {}
        self._same_bits = used.backend == alone.backend == "onnxruntime-cpu"
        self.compared = self.partial_rounds = 0

    def run(self, rounds: int) -> None:
        ways = (self._generate, self._submit, self._branches, self._session)
        for _ in range(rounds):
            self._random.choice(ways)()

    def _tokens(self, most: int) -> list[int]:
        return [self._random.randint(1, VOCAB) for _ in range(self._random.randint(1, most))]

    def _prompt(self) -> list[int]:
        """Prompts begin alike, so that caches find them, and some repeat themselves, so that n-grams draft."""
        chance = self._random.random
        prompt = list(self._random.choice(self._beginnings))
        if chance() < 0.5:
            prompt = prompt[: self._random.randint(1, len(prompt))]
        if chance() < 0.6:
            prompt += self._tokens(20)
        if chance() < 0.3:
            prompt = (prompt[:5] * 30)[: self._random.randint(5, 70)]
        return prompt

    def _sampling(self) -> dict[str, Any]:
        chosen = {
            "max_new_tokens": self._random.choice([1, 2, 7, 20, 60]),
            "temperature": self._random.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
            "seed": self._random.randint(0, 50),
            "top_k": self._random.choice([0, 0, 0, 5, 50]),
            "ignore_eos": self._random.random() < 0.6,
            "logprobs": self._random.choice([None, None, 2]),
            "stop": self._random.choice([[], [], [], ["e", "\n"], ["in"]]),
            "eos_token_ids": self._random.choice([[0], list(range(0, 300, 23))]),
        }
        rules = self._random.choice(RULES) if self._random.random() < 0.3 else {}
        return chosen | ({"top_p": 0.9} if self._random.random() < 0.3 else {}) | rules

    def _drafting(self, sampling: dict[str, Any], *, rejection: bool = True) -> dict[str, Any]:
        drafter = self._random.choice([*self._coupled, *self._rejecting] if rejection else self._coupled)
        chosen = {"drafter": drafter, "auto_disable": self._random.random() < 0.5}
        lossless = self._partial and drafter not in self._rejecting and self._random.random() < 0.3
        if drafter not in self._rejecting and self._random.random() < 0.2:
            chosen |= self._random.choice(LIMITS)
        budget = {"partial_kv": "lossless", "partial_budget": self._random.choice([None, 2, 3, "auto"])}
        return chosen | (budget if lossless else {})

    def _compare(
        self, prompt: list[int], sampling: dict[str, Any], drafting: dict[str, Any], found: Generation | list[int],
    ) -> None:  # fmt: skip
        """A generation that was cancelled, or tokens of one that was left, are the beginning of the whole."""
        drafter = drafting["drafter"] if drafting["drafter"] in self._rejecting else "none"
        key = repr((prompt, sorted(sampling.items()), drafter))
        if key not in self._expected:
            self._expected[key] = self._alone.generate(prompt, drafter=drafter, **sampling)
        expected, whole = self._expected[key], isinstance(found, Generation) and found.finish_reason != "cancelled"
        tokens = found.token_ids if isinstance(found, Generation) else found
        use = f"seed {self._seed}", drafting, key
        assert tokens == (expected.token_ids if whole else expected.token_ids[: len(tokens)]), use
        if whole and self._same_bits and "partial_kv" not in drafting:
            assert isinstance(found, Generation)
            assert (found.text, found.logprobs) == (expected.text, expected.logprobs), use
        self.compared += 1
        self.partial_rounds += found.stats.partial_rounds if isinstance(found, Generation) else 0

    def _generate(self) -> None:
        prompt, sampling = self._prompt(), self._sampling()
        drafting = self._drafting(sampling)
        stream = self._used.stream(prompt, **sampling, **drafting)
        if self._random.random() < 0.3:
            found = [token for span in islice(stream, self._random.randint(1, 5)) for token in span.token_ids]
            stream.close()
            self._compare(prompt, sampling, drafting, found)
        else:
            self._compare(prompt, sampling, drafting, stream.result)

    def _submit(self) -> None:
        samplings = [self._sampling() for _ in range(self._random.randint(2, 12))]
        asked = [(self._prompt(), sampling, self._drafting(sampling)) for sampling in samplings]
        handles = [
            self._used.submit(prompt, priority=self._random.randint(0, 2), **sampling, **drafting)
            for prompt, sampling, drafting in asked
        ]
        cancelled = [self._random.random() < 0.15 for _ in handles]
        for handle, cut in zip(handles, cancelled, strict=True):
            if cut:
                list(islice(handle, self._random.randint(0, 4)))
                handle.cancel()
        for handle, each in zip(handles, asked, strict=True):
            self._compare(*each, handle.result(60))

    def _branches(self) -> None:
        prefix, sampling, mode = self._prompt(), self._sampling(), self._random.choice(["in-one-sequence", "batching"])
        asked = [(self._tokens(9), self._drafting(sampling)) for _ in range(self._random.randint(2, 10))]
        branches = [{"prompt": tokens, "stream_id": 0, **drafting} for tokens, drafting in asked]
        most = self._random.randint(1, 8)
        stream = self._used.stream_branches(prefix, branches, mode=mode, max_parallel=most, **sampling)
        if self._random.random() < 0.2:
            list(islice(stream, self._random.randint(1, 6)))
            stream.close()
            return
        for (tokens, drafting), result in zip(asked, stream.results, strict=True):
            self._compare(prefix + tokens, sampling, drafting, result)

    def _session(self) -> None:
        session = self._used.session()
        for _ in range(self._random.randint(1, 4)):
            text = session.token_ids
            if text and self._random.random() < 0.4:
                session.truncate(self._random.randint(0, len(text)))
                text = session.token_ids
            prompt = [] if text and self._random.random() < 0.3 else self._prompt()[: 25 if text else None]
            if len(text) + len(prompt) >= CONTEXT - 2:
                break
            # By rejection, tokens depend on where a generation begins.
            sampling = self._sampling()
            drafting = self._drafting(sampling, rejection=False)
            if self._random.random() < 0.15:
                with pytest.raises(RequestError, match="on_round failed: WatcherError"):
                    session.generate(prompt, on_round=self._raise, **sampling, **drafting)
                continue
            if self._random.random() < 0.25:
                stream = session.stream(prompt, **sampling, **drafting)
                tokens = [token for span in islice(stream, self._random.randint(1, 5)) for token in span.token_ids]
                stream.close()
                assert session.token_ids == text + prompt + tokens, f"seed {self._seed}"
                self._compare(text + prompt, sampling, drafting, tokens)
                continue
            found = session.generate(prompt, **sampling, **drafting)
            self._compare(text + prompt, sampling, drafting, found)
        if self._random.random() < 0.7:
            session.close()

    @staticmethod
    def _raise(_: object) -> None:
        raise WatcherError
