"""Random use of runtimes, in every way at once: tokens are those of the target alone, whatever was done before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from tests.integration.random_use import RandomUse

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("run_ahead")]

ROUNDS = 400


CACHES = {
    "no cache": None,
    "large": PrefixCacheConfig(memory_bytes=1 << 21),
    "small": PrefixCacheConfig(memory_bytes=1 << 19, max_cached_tokens=200),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("mode", "cache", "prefill_tokens"),
    [
        ("batching", "no cache", None),
        ("batching", "large", 3),
        ("in-one-sequence", "no cache", 5),
        ("in-one-sequence", "small", None),
    ],
)
def test_tokens_do_not_depend_on_what_was_done_before(
    everything: Runtime,
    everything_plan: Path,
    mode: Any,
    cache: str,
    prefill_tokens: int | None,
    seed: int,
) -> None:
    scheduler = SchedulerConfig(mode=mode, prefill_tokens=prefill_tokens)
    used = Runtime.load(everything_plan, threads=1, prefix_cache=CACHES[cache], scheduler=scheduler)
    user = RandomUse(everything, used, mode, seed)
    user.run(ROUNDS)
    assert user.compared > ROUNDS
    assert used.close(timeout=60)
    if used.prefix_cache is not None:
        used.prefix_cache.check()
        assert used.prefix_cache.in_use == 0
    assert used.memory().idle == 1
