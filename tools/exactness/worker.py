"""A process with the plan loaded, `python -m outrider.tools.exactness.worker`, and its parent's side.

One line of JSON on stdin is the job: `plan`, `backend`, `exactness`, `threads`, `drafters`, `file` (of the prefix
cache), the `asked` requests and the `conditions`. For each condition a line of JSON goes to stdout: `outcomes` and
`witness`, or the `error` that ended it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from outrider import Generation, Handle, PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import OutriderError
from outrider.runtime.generation import FinishReason
from outrider.tools.exactness.conditions import Condition
from outrider.tools.exactness.requests import Asked
from outrider.tools.parting import Logprob, Outcome

_CROWDED = 3  # tokens of a cache that is too small, in prompts


def main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries is no answer
        job = json.loads(sys.stdin.readline())
        for answer in run_job(job):
            print(json.dumps(answer), file=answers, flush=True)


def run_job(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a job's conditions one after another, and give what each came to. Ends after a plan that does not load."""
    asked = [Asked(**each) for each in job["asked"]]
    loaded = _Loaded(job, asked)
    try:
        for each in job["conditions"]:
            condition = Condition(**each)
            try:
                loaded.prepare(condition)
            except OutriderError as error:
                yield {"error": str(error)}
                return
            yield _answer(loaded, condition, asked, job)
    finally:
        loaded.close()


def _answer(loaded: _Loaded, condition: Condition, asked: list[Asked], job: dict[str, Any]) -> dict[str, Any]:
    """Run a condition on the runtime that was prepared for it."""
    times = 2 if condition.cache == "warm" and condition.way == "alone" else 1  # the first fills the cache
    try:
        for _ in range(times):
            run = Run(loaded.runtime, condition, job["drafters"])
            outcomes = WAYS[condition.way](run, asked)
        if condition.save:
            loaded.runtime.save_prefix_cache(job["file"])
    except OutriderError as error:
        return {"error": str(error)}
    return {"outcomes": [asdict(outcome) for outcome in outcomes], "witness": asdict(run.witness)}


class _Loaded:
    """The plan, loaded once for conditions in a row with the same scheduler and no prefix cache, else anew for each."""

    def __init__(self, job: dict[str, Any], asked: list[Asked]) -> None:
        self._job, self._longest = job, max(len(each.prompt) for each in asked)
        self._runtime: Runtime | None = None
        self._for: object = None

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    def prepare(self, condition: Condition) -> None:
        """Load a runtime for a condition, unless the present one will do. Raises `OutriderError` where none loads."""
        scheduler = SchedulerConfig(mode=condition.mode, prefill_tokens=condition.prefill_tokens)
        if condition.cache == "off" and self._runtime is not None and self._for == scheduler:
            return
        self.close()
        self._runtime = Runtime.load(
            self._job["plan"],
            backend=self._job["backend"],
            threads=self._job["threads"],
            verify=False,
            prefix_cache=self._cache(condition),
            scheduler=scheduler,
            exactness=self._job["exactness"],
        )
        self._for = scheduler if condition.cache == "off" else None
        if condition.cache == "loaded":
            self._runtime.load_prefix_cache(Path(self._job["file"]))

    def _cache(self, condition: Condition) -> PrefixCacheConfig | None:
        if condition.cache == "off":
            return None
        crowded = condition.cache == "crowded"
        return PrefixCacheConfig(max_cached_tokens=_CROWDED * self._longest if crowded else 65536)

    def close(self) -> None:
        """Let the present runtime end, and its memory go: several would not fit beside each other."""
        if self._runtime is not None:
            self._runtime.close(drain=False)
        self._runtime = None
        gc.collect()


def run_process(job: dict[str, Any], isa: str | None, without: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the answer to every condition of a job, run in a process of its own.

    Our kernels use `isa`, and NumPy's do `without` these features of the processor.

    A process that ends before its time gives its last words as `error` in place of the condition it ended in.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider.tools.exactness.worker"],
            env=environment(isa, without),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            encoding="utf-8",
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(job), file=process.stdin, flush=True)
            answered, failed = 0, False
            for line in process.stdout:
                answer: dict[str, Any] = json.loads(line)
                answered, failed = answered + 1, "error" in answer
                yield answer
            process.wait()
            if answered < len(job["conditions"]) and not failed:
                said.seek(0)
                words = said.read().strip().splitlines() or [f"exit status {process.returncode}"]
                yield {"error": f"its process ended: {words[-1]}"}
        finally:
            process.kill()
            process.communicate()


def environment(isa: str | None, without: Sequence[str]) -> dict[str, str]:
    """The variables of a process with other instructions (see `run_process`)."""
    found = dict(os.environ)
    if isa is not None:
        found["OUTRIDER_ISA"] = isa
    if without:
        found["NPY_DISABLE_CPU_FEATURES"] = " ".join(without)
    return found


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
        return {"drafter": drafter, "auto_disable": False, **asked.options, **self.condition.options}

    def outcome(self, found: Generation, asked: Asked) -> Outcome:
        self.witness.see(found)
        return outcome_of(found, asked)


def outcome_of(found: Generation, asked: Asked) -> Outcome:
    """Return what there is to compare of a generation; log-probabilities where they were asked for."""
    logprobs = tuple(Logprob(each.token_id, each.logprob, tuple(each.top)) for each in found.logprobs)
    kept = logprobs if "logprobs" in asked.options else None
    return Outcome(
        tuple(found.token_ids), found.text, found.finish_reason.value, kept, logprobs_from=found.stats.resumed_tokens
    )


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
    """Wait until a request has given `tokens` tokens, or ended; return those that it has given."""
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


Way = Callable[[Run, Sequence[Asked]], list[Outcome]]
WAYS: dict[str, Way] = {way.__name__: way for way in (alone, session, branches, company, interrupted, cancelled)}
"""How the requests of a condition are made, by `Condition.way`."""


if __name__ == "__main__":
    main()
