"""`outrider doctor`: sentences on what is here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outrider.tools.doctor
from outrider.tools.doctor import examine, main


def test_a_plans_backends_and_the_extras_are_reported(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(toy_plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend onnxruntime-cpu"] == "runs here"
    assert {"outrider", "processor", "nvidia driver", "extra serve", "extra dev"} <= set(found)
    assert main([]) == 0
    assert "extra serve" in capsys.readouterr().out
    assert main([str(toy_plan.parent)]) == 2
    assert "plan.json" in capsys.readouterr().err


def test_what_an_extra_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy", "nothing-so-named>=2; extra == 'serve'", "numpy>=1; extra == 'serve'"]
    needed += ["outrider[serve]; extra == 'x'"]
    monkeypatch.setattr(outrider.tools.doctor, "requires", lambda _: needed)
    found = examine(None)
    assert found["extra serve"] == "lacks nothing-so-named"
    assert "extra x" not in found
