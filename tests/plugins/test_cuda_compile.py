"""The kernels compile ahead of time for every architecture, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.plans.errors import PlanError
from outrider.plugins.cuda import LAUNCHES
from outrider.plugins.cuda.compile import CUBINS, compile_kernels

pytest.importorskip("cuda.core")


@pytest.mark.parametrize(
    "architecture", ["sm_80", "sm_90", *(pytest.param(other, marks=pytest.mark.long) for other in ("sm_75", "sm_120"))]
)
def test_every_kernel_is_in_the_cubin(architecture: str) -> None:
    cubin = compile_kernels(architecture)
    assert cubin[:4] == b"\x7fELF"
    for launch in LAUNCHES.values():
        assert f".text.{launch.kernel}\0".encode() in cubin


def test_two_compilations_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CUBINS)
    (source := tmp_path / "one.cu").write_text('#include "set_numbers.cu.h"\n', encoding="utf-8")
    assert compile_kernels("sm_90", str(source)) == compile_kernels("sm_90", str(source))


@pytest.mark.parametrize("architecture", ["sm_12", "compute_90", "gfx90a"])
def test_what_is_no_architecture_is_refused(architecture: str, tmp_path: Path) -> None:
    (source := tmp_path / "one.cu").write_text('#include "set_numbers.cu.h"\n', encoding="utf-8")
    with pytest.raises(PlanError, match=architecture):
        compile_kernels(architecture, str(source))


def test_shared_headers_need_no_standard_library() -> None:
    """NVRTC has none: what is not for the CPU alone may include nothing but its neighbours, after a guard."""
    sources = Path(__file__).resolve().parents[2] / "plugins" / "csrc"
    headers = [
        path for path in sources.rglob("*.h") if not {"cpu", "onnxruntime"} & set(path.relative_to(sources).parts)
    ]
    assert {path.name for path in headers if "#include <" in path.read_text(encoding="utf-8")} == {"portable.h"}
