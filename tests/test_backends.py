"""Backends as objects: their halves, the table that the command prints, and who alone may know one by its name."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from outrider.compiler.backends import BACKEND_CLASSES, make_backend_class
from outrider.compiler.backends.base import Backend, GpuBackend
from outrider.compiler.models.config import WeightType
from outrider.plans.backends import BACKENDS, DEFAULT, Feature
from outrider.runtime.backends import DRIVERS, reason_against
from outrider.tools.backends import main, support_table
from tests.conftest import REPOSITORY
from tests.test_architecture import PACKAGES, relative, sources

HALVES = ("plans/backends.py", "compiler/backends/", "runtime/backends/")


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_backend_has_both_halves_which_agree(kind: str) -> None:
    support, section = BACKENDS[kind], BACKEND_CLASSES[kind](kind=kind)
    assert section.support is support
    assert DRIVERS[kind].reason(None) == reason_against(kind, None)
    assert isinstance(section, GpuBackend) != support.on_processor
    assert set(support.weights) - {"int8", "int4"} <= set(get_args(WeightType))
    assert set(support.lacks) <= set(get_args(Feature))
    assert reason_against(DEFAULT, None) is None


def test_a_backend_without_a_module_reads_standard_onnx() -> None:
    """So a new one that needs no kernels and no keys is a line of `plans/backends.py` and a driver."""
    made = make_backend_class("of-tests", "outrider.compiler.backends.of_tests")
    backend = made(kind="of-tests", dtype="float16")
    assert isinstance(backend, Backend)
    assert backend.model_dump() == {"kind": "of-tests", "dtype": "float16"}
    assert "kind" in made.model_json_schema()["properties"]
    with pytest.raises(ValueError, match="of-tests"):
        made(kind="cuda")


def test_the_table_of_support_is_the_one_that_the_command_prints() -> None:
    assert "\n".join(support_table()) in (REPOSITORY / "SUPPORT.md").read_text(encoding="utf-8")


def test_the_command_reports_every_backend_and_loads_no_compiler_library(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from outrider.tools.backends import main; main(['--json']); "
        "print({'torch', 'onnx', 'onnx_ir', 'onnxscript', 'yaml'} & set(sys.modules))"
    )
    printed, loaded = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).splitlines()
    assert loaded == "set()"
    found = {row.pop("kind"): row for row in json.loads(printed)["backends"]}
    assert list(found) == list(BACKENDS)
    assert (found[DEFAULT]["cannot_run"], found[DEFAULT]["cannot_build"]) == (None, None)
    assert found["cuda"]["lacks"]["experts"] == "has no kernels for them yet"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "tensorrt-rtx lacks rejection: it has no float64" in text
    for kind in BACKENDS:
        reason = found[kind]["cannot_run"]
        assert reason is None or f"{kind} does not run here: {reason}" in text


def known_by_name(path: Path) -> Iterator[str]:
    """Comparisons of a file with a backend's kind, and tests for the class of one."""
    classes = {backend.__name__ for backend in (GpuBackend, *BACKEND_CLASSES.values())}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        compared = isinstance(node, ast.Compare) and any(
            isinstance(each, ast.Constant) and each.value in BACKENDS for each in ast.walk(node)
        )
        tested = isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if compared or (tested and any(isinstance(each, ast.Name) and each.id in classes for each in ast.walk(node))):
            yield ast.unparse(node)


def test_no_other_module_knows_a_backend_by_its_name() -> None:
    found = {
        relative(path): list(known_by_name(path))
        for package in (*PACKAGES, "tools")
        for path in sources(package)
        if not relative(path).startswith((*HALVES, "tools/lab/"))  # there is PyTorch's device `cuda`
    }
    assert {path: said for path, said in found.items() if said} == {}
