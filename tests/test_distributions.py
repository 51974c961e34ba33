"""What installing Outrider brings: the distribution, and the one that stands in onnxruntime's place on a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from outrider.plans.extras import install_on_gpu
from outrider.runtime.backends.onnxruntime_cuda import LIBRARIES
from tests.conftest import REPOSITORY
from tests.fake_cuda import DRIVER
from tests.fake_cuda.provider import CudaProvider
from tests.packages import skip_without_index

ON_GPU = REPOSITORY / "tools" / "onnxruntime-gpu"
CONSTRAINTS = REPOSITORY / "tools" / "constraints.txt"
PACKAGES = {  # by the libraries that they hold
    "libcudart": "nvidia-cuda-runtime",
    "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas",
    "libcurand": "nvidia-curand",
    "libcudnn": "nvidia-cudnn-cu13",
}


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in requirements}


def test_what_stands_for_onnxruntime_is_onnxruntime_gpu_of_the_same_version() -> None:
    ours, stands = project(REPOSITORY), project(ON_GPU)
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text(encoding="utf-8").split())
    assert stands["name"] == "onnxruntime"
    assert stands["name"] in named(ours["dependencies"])
    assert f"onnxruntime-gpu=={stands['version']}" in stands["dependencies"]
    assert stands["version"] == pinned["onnxruntime"] == pinned["onnxruntime-gpu"]
    every = [*ours["dependencies"], *(each for extra in ours["optional-dependencies"].values() for each in extra)]
    assert "onnxruntime-gpu" not in named(every), "it would be installed over onnxruntime"
    command = f"pip install ./{ON_GPU.relative_to(REPOSITORY)} "
    assert command in install_on_gpu()
    assert command in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_every_library_that_is_looked_for_is_in_a_package() -> None:
    dependencies = named(project(ON_GPU)["dependencies"])
    assert {PACKAGES[library.partition(".")[0]] for library in LIBRARIES} <= dependencies


@pytest.mark.cuda_provider
def test_every_library_that_the_provider_is_linked_with_is_looked_for(cuda_provider: CudaProvider) -> None:
    provider = cuda_provider.site / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    ended = subprocess.run(["readelf", "-d", provider], capture_output=True, text=True, check=True)
    linked = {name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", ended.stdout) if name.startswith("libcu")}
    assert linked - {DRIVER} <= {library.format(cuda=13) for library in LIBRARIES}


@pytest.mark.long
def test_it_has_no_files(tmp_path: Path) -> None:
    ended = pip("wheel", "--no-deps", "--wheel-dir", tmp_path, ON_GPU)
    skip_without_index(ended)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = tmp_path.glob("onnxruntime-*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert {Path(name).parts[0].rpartition(".")[2] for name in files.namelist()} == {"dist-info"}


@pytest.mark.long
def test_one_command_installs_one_of_the_two(tmp_path: Path) -> None:
    made = subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=False)
    assert made.returncode == 0
    report = tmp_path / "report.json"
    ended = pip("--python", tmp_path / "venv" / "bin" / "python", "install", "--dry-run", "--report", report,
                ON_GPU, f"{REPOSITORY}[gpu]")  # fmt: skip
    skip_without_index(ended)
    assert ended.returncode == 0, ended.stderr
    installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    sources = {each["metadata"]["name"]: each["download_info"] for each in installed}
    assert "dir_info" in sources["onnxruntime"]
    assert sources.keys() >= {"onnxruntime-gpu", "outrider", "cuda-bindings", *PACKAGES.values()}


def pip(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    before = ["--disable-pip-version-check", "--retries", "1"]
    return subprocess.run(
        [sys.executable, "-m", "pip", *before, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
