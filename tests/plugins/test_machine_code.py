"""What NVRTC makes of the kernels, read instruction by instruction: faults that no emulator sees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.plugins.cuda.compile import compile_kernels
from tests.plugins.machine_code import DEPBAR, HMMA, IMMA, LDG, NAMES, instructions, loops_with

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


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_the_decoder_agrees_with_nvdisasm(cubin: bytes, tmp_path: Path, kernel: str) -> None:
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        pytest.skip("nvdisasm is not installed (Python package nvidia-cuda-nvdisasm)")
    file = tmp_path / "kernels.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([disassembler, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    body = text.split(f".text.{kernel}:")[1].split("\n.text.")[0]
    listed = {
        int(place, 16): name for place, name in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(\w+)", body)
    }
    code = instructions(cubin, kernel)
    for operation, name in NAMES.items():
        found = {each.place for each in code if each.operation == operation}
        assert found or operation in (IMMA, HMMA)  # a kernel has one of these
        assert found <= {place for place, of in listed.items() if of == name}
