"""`tools.lab.embedded`: generations from C against from Python, and processes that fail."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from outrider.plans.errors import OutriderError
from outrider.tools.lab import embedded
from outrider.tools.lab.embedded import _Process

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit('no such plan')", "no such plan"),
        ("print('hello')", "it says 'hello' where it should be ready"),
        ("print('ready', flush=True)", "exit status 0"),
        (
            "print('ready', flush=True); input(); print('soon', flush=True); input()",
            "it says 'soon' in place of a time",
        ),
        ("print('ready', flush=True); input(); raise SystemExit('out of memory')", "out of memory"),
        ("print('ready', flush=True); input(); print('1.5', flush=True); raise SystemExit('late')", "late"),
    ],
)
def test_a_process_that_fails_is_heard(program: str, said: str) -> None:
    noise = "import sys; print(200_000 * chr(10), file=sys.stderr); "
    with pytest.raises(OutriderError, match=said), _Process([sys.executable, "-c", noise + program]) as process:
        process.generate()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C and a C++ compiler")
def test_embedded_compares_c_with_python(toy_plan: Path, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("cffi")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n', encoding="utf-8")
    sizes = ("--new", "4", "--reps", "2", "--runs", "2")
    assert embedded.main([str(toy_plan), "--prompts", str(prompts), *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ms_per_token"].keys() == {"c", "python"}
    assert found["threads"] >= 1
    assert (found["new_tokens"], len(found["prompts_sha256"])) == (4, 64)
    assert 0 < found["ratio_p10"] <= found["ratio"] <= found["ratio_p90"]
    assert embedded.main([str(toy_plan), "--prompts", str(prompts), *sizes]) == 0
    assert "C takes " in capsys.readouterr().out
