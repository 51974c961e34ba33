"""What NVRTC makes of the kernels, read instruction by instruction: faults that no emulator sees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from plugins.cuda.compile import compile_kernels
from tests.plugins.machine_code import DEPBAR, IMMA, LDG, NAMES, Instruction, instructions, loops_with

pytest.importorskip("cuda.core")

PRODUCTS = {"outrider_quant_product": (IMMA, 2)}
"""Kernels: what they multiply by, and how many loops they have for few rows: one for each number of bits."""

FEW = {IMMA: 4}
"""Matrix products of a turn, of up to eight rows."""


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    source = tmp_path_factory.mktemp("products") / "products.cu"
    source.write_text('#include "engine/quant_product.cu.h"\n', encoding="utf-8")
    return compile_kernels("sm_90", str(source))


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_no_turn_waits_for_memory_that_it_asks_for(cubin: bytes, kernel: str) -> None:
    """Of up to eight rows. All that a turn of the loop reads comes by copies that were started turns before: it has no
    load of global memory, and its one wait leaves the newest groups of copies open."""
    code, (multiplies, loops) = instructions(cubin, kernel), PRODUCTS[kernel]
    few = [loop for loop in loops_with(code, multiplies, DEPBAR) if count(loop, multiplies) == FEW[multiplies]]
    assert len(few) == loops
    for loop in few:
        (wait,) = (each for each in loop if each.operation == DEPBAR)
        assert wait.open_groups is not None
        assert wait.open_groups >= 2, "turns of two blocks of a warp each"
        loads = [hex(each.place) for each in loop if each.operation == LDG]
        assert loads == [], f"{kernel} loads at {', '.join(loads)} what the next turn waits for"


def count(loop: list[Instruction], operation: int) -> int:
    return sum(each.operation == operation for each in loop)


def test_the_decoder_agrees_with_nvdisasm(cubin: bytes, tmp_path: Path) -> None:
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        pytest.skip("nvdisasm is not installed (Python package nvidia-cuda-nvdisasm)")
    file = tmp_path / "kernels.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([disassembler, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    body = text.split(f".text.{next(iter(PRODUCTS))}:")[1].split("\n.text.")[0]
    listed = {
        int(place, 16): name for place, name in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(\w+)", body)
    }
    code = instructions(cubin, next(iter(PRODUCTS)))
    for operation, name in NAMES.items():
        found = {each.place for each in code if each.operation == operation}
        assert found
        assert found <= {place for place, of in listed.items() if of == name}
