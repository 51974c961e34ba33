"""The logits after a prompt, from passes of any number of rows, and with other instructions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider import Runtime
from tests.instruction_sets import Results, with_instructions


def expect_the_same_bits(runtime: Runtime, prompt: Sequence[int], numbers: Sequence[int]) -> None:
    """The prompt's last row comes out of passes of each of these numbers of its last tokens, with the same bits."""
    found = []
    for last in numbers:
        session = runtime.session()
        session.generate(prompt[:-last], max_new_tokens=1, drafter="none", ignore_eos=True)
        session.truncate(len(prompt) - last)
        session.generate(prompt[-last:], max_new_tokens=1, drafter="none", ignore_eos=True)
        found.append(session.step_logits(0).copy())
    for logits in found[1:]:
        np.testing.assert_array_equal(logits.view(np.uint32), found[0].view(np.uint32))


def expect_the_bits_of_plain_code(plan: Path) -> None:
    """With this processor's best instructions; `tests/plugins/test_other_processors.py` has every op with all."""
    found, plain = logits_of(plan), with_instructions("plain", __name__, "logits_of", plan)
    for name, logits in plain.items():
        np.testing.assert_array_equal(found[name].view(np.uint32), logits.view(np.uint32), name)


def logits_of(plan: Path) -> Results:
    """The logits after a prompt, and after steps of one token."""
    session = Runtime.load(plan, threads=2).session()
    found = {}
    for index, prompt in enumerate([[(41 * i) % 299 + 1 for i in range(60)], [5, 6, 7], [9]]):
        session.generate(prompt, max_new_tokens=3, drafter="none", ignore_eos=True)
        found[str(index)] = session.step_logits(0).copy()
    return found
