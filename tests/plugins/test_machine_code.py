"""What NVRTC makes of the kernels, read instruction by instruction: faults that no emulator sees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from plugins.cuda.compile import compile_kernels
from tests.plugins.machine_code import DEPBAR, IMMA, LDG, NAMES, instructions, loops_with

pytest.importorskip("cuda.core")

KERNEL = "outrider_quant_product"
FEW = (2, 4)
"""Matrix products of a turn of up to eight rows: of one block of 8 bits, and of two blocks of 4. More rows have 8."""


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    source = tmp_path_factory.mktemp("products") / "products.cu"
    source.write_text('#include "engine/quant_product.cu.h"\n', encoding="utf-8")
    return compile_kernels("sm_90", str(source))


def test_no_turn_waits_for_memory_that_it_asks_for(cubin: bytes) -> None:
    """Of up to eight rows. All that a turn of the loop reads comes by copies that were started turns before: it has no
    load of global memory, and its one wait leaves the newest groups of copies open."""
    loops = loops_with(instructions(cubin, KERNEL), IMMA, DEPBAR)
    few = [loop for loop in loops if sum(each.operation == IMMA for each in loop) in FEW]
    assert len(few) == 2
    for loop in few:
        (wait,) = (each for each in loop if each.operation == DEPBAR)
        assert wait.open_groups is not None
        assert wait.open_groups >= 2, "of 8 to 9 KiB each"
        loads = [hex(each.place) for each in loop if each.operation == LDG]
        assert loads == [], f"{KERNEL} loads at {', '.join(loads)} what the next turn waits for"


def test_the_decoder_agrees_with_nvdisasm(cubin: bytes, tmp_path: Path) -> None:
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        pytest.skip("nvdisasm is not installed (Python package nvidia-cuda-nvdisasm)")
    file = tmp_path / "kernels.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([disassembler, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    body = text.split(f".text.{KERNEL}:")[1].split("\n.text.")[0]
    listed = {
        int(place, 16): name for place, name in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(\w+)", body)
    }
    code = instructions(cubin, KERNEL)
    for operation, name in NAMES.items():
        found = {each.place for each in code if each.operation == operation}
        assert found
        assert found <= {place for place, of in listed.items() if of == name}
