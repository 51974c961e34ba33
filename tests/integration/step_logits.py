"""The logits behind a prompt, from passes of any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime import Runtime


def expect_the_same_bits(runtime: Runtime, prompt: Sequence[int], numbers: Sequence[int]) -> None:
    """The prompt's last row comes out of passes of so many of its last tokens, and has the same bits from each."""
    found = []
    for last in numbers:
        session = runtime.session()
        session.generate(prompt[:-last], max_new_tokens=1, drafter="none", ignore_eos=True)
        session.truncate(len(prompt) - last)
        session.generate(prompt[-last:], max_new_tokens=1, drafter="none", ignore_eos=True)
        found.append(session.step_logits(0).copy())
    for logits in found[1:]:
        np.testing.assert_array_equal(logits.view(np.uint32), found[0].view(np.uint32))
