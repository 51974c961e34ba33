"""A process with the plan loaded, `python -m outrider.tools.exactness.worker`, and its parent's side.

One line of JSON on stdin is the job: `plan`, `backend`, `exactness`, `threads`, `drafters`, `file` (of the prefix
cache), the `asked` requests and the `conditions`. For each condition a line of JSON goes to stdout: `outcomes` and
`witness`, or the `error` that ended it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import OutriderError
from outrider.tools.exactness.conditions import Condition
from outrider.tools.exactness.requests import Asked
from outrider.tools.exactness.ways import WAYS, Run

_CROWDED = 3  # tokens of a cache that is too small, in prompts


def main() -> None:
    """Do the job that stands on stdin."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
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
        """The runtime that was prepared last."""
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


if __name__ == "__main__":
    main()
