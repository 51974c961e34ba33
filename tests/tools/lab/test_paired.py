"""Two versions by turns: the figures of a checkout against itself, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.tools.lab import paired
from tests.conftest import HELD_OUT, REPOSITORY

SIZES = (
    "--starts",
    "1",
    "--pairs",
    "2",
    "--new",
    "6",
    "--prompt-len",
    "20",
    "--prompts",
    str(HELD_OUT),
    "--threads",
    "1",
)


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of this version, which stands for this one too: with a `.venv`, wherever the tests' own is."""
    for name in ("outrider", "tools"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(paired, "HERE", tmp_path)
    return tmp_path


@pytest.mark.long
def test_every_way_of_two_versions_is_measured_and_says_the_same(
    before: Path, everything_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(before), "--plan", str(everything_plan), *SIZES, "--drafters", "ngram"]
    assert paired.main([*arguments, "--sequences", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["way"], row["sequences"]) for row in rows] == [
        (way, 1 if way == "session" else 3) for way in paired.WAYS
    ]
    for row in rows:
        assert row["same_tokens"]
        assert row["ratio_p25"] <= row["ratio"] <= row["ratio_p75"]
        assert min(row["before_ms_per_token"], row["after_ms_per_token"], row["ratio_of_fastest"]) > 0
        assert (row["after_host_us"] is not None) == (row["way"] == "session")

    assert paired.main([*arguments, "--ways", "session", "--starts", "2"]) == 0
    assert "after / before" in capsys.readouterr().out


def test_a_version_that_cannot_run_is_named(
    before: Path, everything_plan: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, bare = str(everything_plan), tmp_path_factory.mktemp("bare")
    assert paired.main([str(bare), "--plan", plan, *SIZES]) == 2
    assert f"{bare} (before) has no .venv" in capsys.readouterr().err
    assert paired.main([str(before), "--plan", "build/none", *SIZES]) == 2
    assert "build/none (before) is no plan" in capsys.readouterr().err
    assert paired.main([str(before), "--plan", plan, *SIZES, "--ways", "beams"]) == 2
    assert "--ways names 'beams'" in capsys.readouterr().err

    broken = bare / ".venv/bin/python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\necho first >&2; echo it is broken >&2; exit 3\n")
    broken.chmod(0o755)
    assert paired.main([str(bare), "--plan", plan, *SIZES, "--ways", "session"]) == 2
    assert f"The version in {bare} has failed: it is broken" in capsys.readouterr().err


def test_different_tokens_and_the_ratio_of_pairs_are_reported() -> None:
    def burst(ms: float, token: int) -> dict[str, object]:
        return {"ms": ms, "tokens": [[token, 2]], "host_us": None}

    found = {"before": [burst(1, 1), burst(10, 1), burst(4, 1)], "after": [burst(2, 1), burst(5, 1), burst(4, 3)]}
    row = paired._row(found)
    assert (row["ratio"], row["ratio_of_fastest"], row["same_tokens"]) == (1.0, 2.0, False)
    assert (row["before_ms_per_token"], row["after_ms_per_token"]) == (2.0, 2.0)
