"""What NVRTC makes of the kernels, read instruction by instruction: faults that no emulator sees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from plugins.cuda.compile import compile_kernels
from tests.plugins.machine_code import BAR, DEPBAR, IMMA, LDG, NAMES, Instruction, instructions, loops_with

pytest.importorskip("cuda.core")

QUANT_PRODUCTS = ("outrider_quant_product", "outrider_normed_quant_product")


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    source = tmp_path_factory.mktemp("products") / "products.cu"
    source.write_text('#include "engine/quant_product.cu.h"\n', encoding="utf-8")
    return compile_kernels("sm_90", str(source))


def waits_for(load: Instruction, loop: list[Instruction]) -> Instruction | None:
    """The instruction that waits for a load of a loop before the next turn waits for its weights, if there is one."""
    at = loop.index(load) + 1
    after = loop[at:] + loop[:at]
    next_turn = next(n for n, each in enumerate(after) if each.operation == BAR)
    needed = next(n for n, each in enumerate(after) if n > next_turn and each.operation == DEPBAR)
    return next((each for each in after[:needed] if load.signals in each.waits), None)


@pytest.mark.parametrize(("kernel", "least"), [(QUANT_PRODUCTS[0], 4), (QUANT_PRODUCTS[1], 0)])
def test_nothing_waits_for_a_prefetch_before_the_next_block_is_needed(cubin: bytes, kernel: str, least: int) -> None:
    """Of up to eight rows: of more, NVRTC has loads of inputs wait for each other. Weights come by copies that a DEPBAR
    waits for, inputs by loads, or from shared memory where the block has normed them."""
    code = instructions(cubin, kernel)
    loops = [loop for loop in loops_with(code, IMMA, BAR) if sum(each.operation == IMMA for each in loop) == 2]
    assert len(loops) == 2, "one for each number of bits"
    for loop in loops:
        assert sum(each.operation == DEPBAR for each in loop) == 1
        loads = [each for each in loop if each.operation == LDG]
        assert len(loads) >= least
        for load in loads:
            waiting = waits_for(load, loop)
            assert waiting is None, f"{kernel}: the load at {load.place:#x} is waited for at {waiting.place:#x}"


def test_the_decoder_agrees_with_nvdisasm(cubin: bytes, tmp_path: Path) -> None:
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        pytest.skip("nvdisasm is not installed (Python package nvidia-cuda-nvdisasm)")
    file = tmp_path / "kernels.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([disassembler, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    body = text.split(f".text.{QUANT_PRODUCTS[0]}:")[1].split("\n.text.")[0]
    listed = {
        int(place, 16): name for place, name in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(\w+)", body)
    }
    code = instructions(cubin, QUANT_PRODUCTS[0])
    for operation, name in NAMES.items():
        found = {each.place for each in code if each.operation == operation}
        assert found
        assert found <= {place for place, of in listed.items() if of == name}
