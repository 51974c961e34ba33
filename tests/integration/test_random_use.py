"""Random use of runtimes, in every way at once: tokens are those of the target alone, whatever was done before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import PrefixCacheConfig, Runtime
from tests.integration.random_use import expect_the_tokens_of_the_target_alone

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
    own: dict[str, Any] = {"seed": seed, "threads": 1, "cache": CACHES[cache], "prefill_tokens": prefill_tokens}
    used = expect_the_tokens_of_the_target_alone(everything, everything_plan, mode, ROUNDS, **own)
    assert used.memory().idle == 1
