"""A plan generates where nothing but the base dependencies is installed, and no checkout is in sight."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from outrider import Runtime
from tests.conftest import REPOSITORY
from tests.packages import skip_without_index

PROMPT = "import os\n"
CONSTRAINTS = REPOSITORY / "tools" / "constraints.txt"
PROGRAM = """
import importlib.util, json, sys
import outrider
found = outrider.Runtime.load(sys.argv[1]).generate(sys.argv[2], max_new_tokens=24, temperature=0.9, seed=6)
print(json.dumps({
    "tokens": found.token_ids,
    "source": outrider.__file__,
    "there": [m for m in ("torch", "onnx", "onnxscript", "safetensors", "transformers") if importlib.util.find_spec(m)],
}))
"""


def run(command: list[str | Path], folder: Path, **added: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=folder, env=environment | added, capture_output=True, text=True, timeout=900)


def generate(plan: Path) -> list[str | Path]:
    return ["generate", plan, "--prompt", PROMPT, "--max-new-tokens", "8", "--json"]


@pytest.mark.long
def test_an_installed_runtime_alone_gives_the_same_tokens(toy: Runtime, toy_plan: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    made = run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], outside)
    assert made.returncode == 0, made.stderr
    python = tmp_path / "venv" / "bin" / "python"
    # A build folder of its own: the checkout's belongs to the editable install.
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check"]
    install += ["--no-compile", "--retries", "1", REPOSITORY, "--config-settings", f"build-dir={tmp_path / 'build'}"]
    if CONSTRAINTS.is_file():
        install += ["--constraint", CONSTRAINTS]
    installed = run(install, outside)
    skip_without_index(installed)
    assert installed.returncode == 0, installed.stdout[-2000:] + installed.stderr[-2000:]

    ended = run([python, "-c", PROGRAM, toy_plan, PROMPT], outside)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["there"] == []
    assert Path(found["source"]).is_relative_to(tmp_path / "venv")
    assert found["tokens"] == toy.generate(PROMPT, max_new_tokens=24, temperature=0.9, seed=6).token_ids

    assert not list((tmp_path / "venv").rglob("outrider/tools/lab"))  # it is for checkouts
    refused = run([python, "-m", "outrider.compiler", "build", toy_plan.parent / "model.yaml"], outside)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr
    assert "pip install '.[compiler]'" in refused.stderr

    # Among modules of the user's with our folders' names, the console command too.
    for name in ("commands", "compiler", "plans", "plugins", "runtime", "tools"):
        (outside / f"{name}.py").write_text("raise SystemExit('the user's')", encoding="utf-8")
    outrider = tmp_path / "venv" / "bin" / "outrider"
    for path in ({}, {"PYTHONPATH": "."}):
        ended = run([outrider, *generate(toy_plan)], outside, **path)
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["token_ids"] == toy.generate(PROMPT, max_new_tokens=8).token_ids
    measured = run([outrider, "bench", "startup", toy_plan, "--reps", "1", "--json"], outside, PYTHONPATH=".")
    assert measured.returncode == 0, measured.stderr  # its child processes find ours too
    refused = run([outrider, "build", toy_plan.parent / "model.yaml"], outside, PYTHONPATH=".")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "which is not installed" in refused.stderr


@pytest.mark.long
def test_the_image_serves_a_plan(toy: Runtime, toy_plan: Path, tmp_path: Path) -> None:
    """Where there is no container runtime, what the Dockerfile runs of pip is run in an environment of its own."""
    if shutil.which("docker") and run(["docker", "info"], tmp_path).returncode == 0:
        made = run(["docker", "build", "--tag", "outrider-tested", REPOSITORY], tmp_path)
        started: list[str | Path] = ["docker", "run", "--rm", f"--volume={toy_plan}:{toy_plan}:ro", "outrider-tested"]
    else:
        ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").replace("**/", "").split()
        shutil.copytree(REPOSITORY, tmp_path / "src", symlinks=True, ignore=shutil.ignore_patterns(*ignored))
        venv.create(tmp_path / "venv", with_pip=True)
        steps = re.findall(r"^RUN (pip .*?)(?: &&.*)?$", (REPOSITORY / "Dockerfile").read_text(encoding="utf-8"), re.M)
        assert len(steps) == 2
        script = " && ".join(steps).replace("/wheels", str(tmp_path / "wheels"))
        path = f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"
        made = run(["bash", "-c", script], tmp_path / "src", PATH=path)
        started = [tmp_path / "venv" / "bin" / "outrider"]
    skip_without_index(made)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    ended = run([*started, *generate(toy_plan)], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["token_ids"] == toy.generate(PROMPT, max_new_tokens=8).token_ids
    assert run([*started, "serve", "--help"], tmp_path).returncode == 0
