"""One side of `tools.lab.paired`, in a process of its own: generates one burst for every line on stdin.

It runs in the checkout that is measured, which may be an older one, so it uses nothing but `Runtime`. Its argument is
a JSON object: `plan`, `drafter`, `way`, `threads`, `sequences`, `new` and `prompts` (token ids). For every line it
prints a JSON object: `ms` of the burst, `tokens` generated, and `host_us` a round outside engines (None for ways of
several sequences).
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

try:
    from outrider import Runtime
except ModuleNotFoundError as missing:  # a checkout from before the package had this name
    if missing.name != "outrider":
        raise
    from runtime import Runtime  # type: ignore[attr-defined, no-redef]


class Side:
    """A loaded plan that generates bursts."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._way, self._prompts, self._sequences = asked["way"], asked["prompts"], asked["sequences"]
        self._runtime = Runtime.load(asked["plan"], threads=asked["threads"], verify=False)
        self._session = self._runtime.session()
        self._options: dict[str, Any] = {
            "drafter": asked["drafter"],
            "max_new_tokens": asked["new"],
            "ignore_eos": True,
            "auto_disable": False,
        }
        self._bursts = 0

    def burst(self) -> dict[str, Any]:
        """Generate after the next prompt."""
        prompt = self._prompts[self._bursts % len(self._prompts)]
        self._bursts += 1
        host_us = None
        began = perf_counter()
        if self._way == "session":
            self._session.reset()
            found = [self._session.generate(prompt, **self._options)]
        elif self._way == "submit":
            handles = [self._runtime.submit(prompt, seed=i, **self._options) for i in range(self._sequences)]
            found = [handle.result() for handle in handles]
        else:
            found = self._runtime.generate_branches(prompt, n=self._sequences, mode=self._way, **self._options)
        ms = 1000 * (perf_counter() - began)
        if self._way == "session":
            stats = found[0].stats
            host_us = 1000 * (stats.total_ms - sum(stats.stage_ms.values())) / max(stats.rounds, 1)
        return {"ms": ms, "tokens": [each.token_ids for each in found], "host_us": host_us}


if __name__ == "__main__":
    side = Side(json.loads(sys.argv[1]))
    for _ in sys.stdin:
        print(json.dumps(side.burst()), flush=True)
