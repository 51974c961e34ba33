"""The kernels compile ahead of time for every architecture, without a GPU; their machine code, read instruction by
instruction, has no faults that no emulator sees."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.plans.errors import PlanError
from outrider.plugins.cuda.compile import CUBINS, compile_kernels
from outrider.plugins.cuda.resources import sections
from outrider.plugins.ops import OPS

pytest.importorskip("cuda.core")

LDG, IMMA, HMMA, DEPBAR, BRA = 0x981, 0x237, 0x23C, 0x91A, 0x947
"""By the lowest twelve bits, which say the operation and the kinds of its operands."""

_SIZE = 16
_NONE = 7  # no scoreboard


@dataclass(frozen=True)
class Instruction:
    """At `place` bytes of its kernel. It signals the scoreboard `signals` when its result is there, after it has waited
    for those of `waits`; a branch goes to the byte `target`, and a DEPBAR leaves `open_groups` of copies open."""

    place: int
    operation: int
    signals: int | None
    waits: frozenset[int]
    target: int | None
    open_groups: int | None


def instructions(cubin: bytes, kernel: str) -> list[Instruction]:
    """Return the instructions of a kernel, in order of place. Raises KeyError for a kernel that is not there."""
    places = {name: (start, end) for name, _, start, end in sections(cubin)}
    start, end = places[f".text.{kernel}"]
    return [_read(place, *struct.unpack_from("<QQ", cubin, start + place)) for place in range(0, end - start, _SIZE)]


def _read(place: int, low: int, high: int) -> Instruction:
    operation, signals, waits = low & 0xFFF, high >> 46 & 7, high >> 52 & 63
    target = None
    if operation == BRA:
        words = ((low >> 34 | high << 30) & (1 << 48) - 1) << 8 | low >> 16 & 0xFF  # of four bytes
        target = place + _SIZE + 4 * (words - (1 << 56) if words >> 55 else words)
    return Instruction(
        place,
        operation,
        None if signals == _NONE else signals,
        frozenset(board for board in range(6) if waits >> board & 1),
        target,
        low >> 38 & 63 if operation == DEPBAR else None,
    )


def loops_with(code: list[Instruction], *operations: int) -> list[list[Instruction]]:
    """Return the smallest loops that have all of `operations`, each from the target of a branch to that branch."""
    spans = sorted({(each.target, each.place) for each in code if each.target is not None and each.target < each.place})
    loops = [[each for each in code if first <= each.place <= last] for first, last in spans]
    loops = [loop for loop in loops if set(operations) <= {each.operation for each in loop}]
    return [loop for loop in loops if not any(_within(other, loop) for other in loops if other is not loop)]


def _within(inner: list[Instruction], outer: list[Instruction]) -> bool:
    return outer[0].place <= inner[0].place and inner[-1].place <= outer[-1].place


@pytest.mark.parametrize(
    "architecture", ["sm_80", "sm_90", *(pytest.param(other, marks=pytest.mark.long) for other in ("sm_75", "sm_120"))]
)
def test_every_kernel_is_in_the_cubin(architecture: str) -> None:
    cubin = compile_kernels(architecture)
    assert cubin[:4] == b"\x7fELF"
    for launch in (op.launch for op in OPS.values() if op.launch):
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


pytest.importorskip("cuda.core")

PRODUCTS = {
    "outrider_quant_product": (IMMA, {2: 0, 4: 0, 8: 16}),
    "outrider_half_product": (HMMA, {8: 1, 32: 4}),
}

"""The matrix product of each kernel; how many a turn of its loops has, and how many loads of global memory.

Of integers, up to eight rows take 2 (a block of 8 bits) or 4 (two blocks of 4), more rows 8; of halves, up to eight
rows take 4 of each type, more rows 16."""


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    source = tmp_path_factory.mktemp("products") / "products.cu"
    included = (f'#include "engine/{name}_product.cu.h"\n' for name in ("quant", "half"))
    source.write_text("".join(included), encoding="utf-8")
    return compile_kernels("sm_90", str(source))


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_no_turn_waits_for_memory_that_it_asks_for(cubin: bytes, kernel: str) -> None:
    """Weights come by copies that were started turns before: a turn's one wait leaves the newest groups of them open.
    Inputs do too where they are integers of up to eight rows; else they are loaded for the next turn, and nothing that
    follows in the same one waits for them."""
    product, expected = PRODUCTS[kernel]
    found = {}
    for loop in loops_with(instructions(cubin, kernel), product, DEPBAR):
        (wait,) = (each for each in loop if each.operation == DEPBAR)
        assert wait.open_groups is not None
        assert wait.open_groups >= 2, "of 2 KiB a warp at least"
        loads = [each for each in loop if each.operation == LDG]
        for load in loads:
            waiting = [hex(each.place) for each in loop if each.place > load.place and load.signals in each.waits]
            assert waiting == [], f"{kernel} waits at {', '.join(waiting)} for what it loads at {load.place:#x}"
        found[sum(each.operation == product for each in loop)] = len(loads)
    assert found == expected
