"""A process with the plan loaded: `python -m tools.exactness.worker`.

One line of JSON on stdin is the job: `plan`, `backend`, `exactness`, `threads`, `drafters`, `file` (of the prefix
cache), the `asked` requests and the `conditions`. For each condition a line of JSON goes to stdout: `outcomes` and
`witness`, or the `error` that ended it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plans.errors import OutriderError
from runtime import PrefixCacheConfig, Runtime, SchedulerConfig
from tools.exactness.asked import Asked
from tools.exactness.conditions import Condition
from tools.exactness.ways import WAYS, Run

_CROWDED = 3  # tokens of a cache that is too small, in prompts


def main() -> None:
    """Do the job that stands on stdin."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
        job = json.loads(sys.stdin.readline())
        for answer in run_job(job):
            print(json.dumps(answer), file=answers, flush=True)


def run_job(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a job's conditions one after another, and give what each came to. Ends behind a plan that does not load."""
    asked = [Asked(**each) for each in job["asked"]]
    loaded = _Loaded(job, asked)
    for each in job["conditions"]:
        condition = Condition(**each)
        try:
            runtime = loaded.runtime(condition)
        except OutriderError as error:
            yield {"error": str(error)}
            return
        run = Run(runtime, condition, job["drafters"])
        try:
            outcomes = WAYS[condition.way](run, asked)
            if condition.cache == "warm" and condition.way == "alone":  # that was the first time
                run = Run(runtime, condition, job["drafters"])
                outcomes = WAYS[condition.way](run, asked)
            if condition.save:
                runtime.save_prefix_cache(job["file"])
        except OutriderError as error:
            yield {"error": str(error)}
            continue
        yield {"outcomes": [outcome.to_json() for outcome in outcomes], "witness": asdict(run.witness)}
    loaded.close()


class _Loaded:
    """The plan, loaded once for all conditions with the same scheduler and no prefix cache, and anew for each other."""

    def __init__(self, job: dict[str, Any], asked: list[Asked]) -> None:
        self._job, self._longest = job, max(len(each.prompt) for each in asked)
        self._plain: tuple[object, Runtime] | None = None
        self._open: list[Runtime] = []

    def runtime(self, condition: Condition) -> Runtime:
        """Return a runtime for a condition; the prefix cache of another one is never in it."""
        key = condition.mode, condition.prefill_tokens
        if condition.cache == "off" and self._plain is not None and self._plain[0] == key:
            return self._plain[1]
        self.close()
        runtime = Runtime.load(
            self._job["plan"],
            backend=self._job["backend"],
            threads=self._job["threads"],
            verify=False,
            prefix_cache=self._cache(condition),
            scheduler=SchedulerConfig(mode=condition.mode, prefill_tokens=condition.prefill_tokens),
            exactness=self._job["exactness"],
        )
        self._open.append(runtime)
        if condition.cache == "off":
            self._plain = key, runtime
        if condition.cache == "loaded":
            runtime.load_prefix_cache(Path(self._job["file"]))
        return runtime

    def _cache(self, condition: Condition) -> PrefixCacheConfig | None:
        if condition.cache == "off":
            return None
        crowded = condition.cache == "crowded"
        return PrefixCacheConfig(max_cached_tokens=_CROWDED * self._longest if crowded else 65536)

    def close(self) -> None:
        """Let every runtime end."""
        for runtime in self._open:
            runtime.close(drain=False)
        self._open, self._plain = [], None


if __name__ == "__main__":
    main()
