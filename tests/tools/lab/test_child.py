"""A child process that answers in lines."""

from __future__ import annotations

import sys

import pytest

from outrider.tools.lab.child import Child, ChildError


def test_a_line_is_answered_and_last_words_are_kept() -> None:
    program = "import sys; print(input() + '!', flush=True); input(); sys.exit('out of memory')"
    with Child([sys.executable, "-c", program]) as child:
        assert child.ask("a") == "a!"
        with pytest.raises(ChildError, match=r"^out of memory$"):
            child.ask("b")
    child.close()  # again without effect


def test_a_process_that_says_nothing_has_its_status_as_last_words() -> None:
    with Child([sys.executable, "-c", "raise SystemExit(3)"]) as child, pytest.raises(ChildError, match="status 3"):
        child.answer()
    with Child(["cat"]) as child:
        assert child.end(10) == 0
