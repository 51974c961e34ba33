"""Two versions by turns: figures of a checkout against itself, what is refused, and the processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.tools.lab import paired
from outrider.tools.lab.child import Child, ChildError
from tests.conftest import HELD_OUT, REPOSITORY

SIZES = ("--starts", 1, "--pairs", 2, "--new", 6, "--prompt-len", 20, "--prompts", HELD_OUT, "--threads", 1)


def write_python(root: Path, script: str) -> None:
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of this version, which stands for this one too: with a `.venv`, which runs the tests' own Python."""
    for name in ("outrider", "tools"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    write_python(tmp_path, f'exec "{sys.executable}" "$@"')
    monkeypatch.setattr(paired, "HERE", tmp_path)
    return tmp_path


@pytest.mark.long
def test_every_way_of_two_versions_is_measured_with_the_same_tokens(
    before: Path, everything_plan: Path, output: Callable[..., str]
) -> None:
    arguments = (before, "--plan", everything_plan, *SIZES, "--drafters", "ngram")
    rows = json.loads(output(paired.main, *arguments, "--sequences", 3, "--json"))["rows"]
    assert [(row["way"], row["sequences"]) for row in rows] == [
        (way, 1 if way == "session" else 3) for way in paired.WAYS
    ]
    for row in rows:
        assert row["same_tokens"]
        assert row["ratio_p25"] <= row["ratio"] <= row["ratio_p75"]
        assert min(row["before_ms_per_token"], row["after_ms_per_token"], row["ratio_of_fastest"]) > 0
        assert (row["after_host_us"] is not None) == (row["way"] == "session")
    assert "after / before" in output(paired.main, *arguments, "--ways", "session", "--starts", 2)


def test_a_version_that_cannot_run_is_named(
    before: Path, everything_plan: Path, tmp_path_factory: pytest.TempPathFactory, output: Callable[..., str]
) -> None:
    bare = tmp_path_factory.mktemp("bare")
    for root, plan, way, said in (
        (bare, everything_plan, "session", f"{bare} (before) has no .venv"),
        (before, "build/none", "session", "build/none (before) is no plan"),
        (before, everything_plan, "beams", "--ways names 'beams'"),
    ):
        assert said in output(paired.main, root, "--plan", plan, *SIZES, "--ways", way, status=2)
    write_python(bare, "echo first >&2; echo it is broken >&2; exit 3")
    said = output(paired.main, bare, "--plan", everything_plan, *SIZES, "--ways", "session", status=2)
    assert f"The version in {bare} has failed: it is broken" in said


def test_different_tokens_and_the_ratio_of_pairs_are_reported() -> None:
    def burst(ms: float, token: int) -> dict[str, object]:
        return {"ms": ms, "tokens": [[token, 2]], "host_us": None}

    found = {"before": [burst(1, 1), burst(10, 1), burst(4, 1)], "after": [burst(2, 1), burst(5, 1), burst(4, 3)]}
    row = paired._row(found)
    assert (row["ratio"], row["ratio_of_fastest"], row["same_tokens"]) == (1.0, 2.0, False)
    assert (row["before_ms_per_token"], row["after_ms_per_token"]) == (2.0, 2.0)


def test_a_child_answers_each_line_and_has_its_last_words_or_its_status() -> None:
    program = "import sys; print(input() + '!', flush=True); input(); sys.exit('out of memory')"
    with Child([sys.executable, "-c", program]) as child:
        assert child.ask("a") == "a!"
        with pytest.raises(ChildError, match=r"^out of memory$"):
            child.ask("b")
    child.close()  # again without effect
    with Child([sys.executable, "-c", "raise SystemExit(3)"]) as child, pytest.raises(ChildError, match="status 3"):
        child.answer()
