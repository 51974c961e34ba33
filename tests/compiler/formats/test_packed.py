"""Packed projections: numbers, integers kept exactly, orders of inputs, and what is refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.formats.packed_tensors import PackedTensors
from outrider.compiler.models.quantization import Packing, WeightGroup, read_packing
from outrider.compiler.quantization.form import WeightSource
from outrider.compiler.tensor_source import Stored
from outrider.plans.errors import CheckpointError
from outrider.plugins.reference import dequantize

from .packed import awq_tensors, compressed_tensors, gptq_tensors, round_in_groups

NAME = "model.layers.0.self_attn.o_proj"
WEIGHT = f"{NAME}.weight"
_SPELLING = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.float16: "F16", torch.bfloat16: "BF16"}
_SPELLING |= {torch.float32: "F32"}


class Held:
    """Tensors in memory, as a `TensorSource` of floats and packed parts."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = {n: t if isinstance(t, Tensor) else torch.from_numpy(np.array(t)) for n, t in tensors.items()}
        self.found = {
            n: Stored(Path("model.safetensors"), tuple(t.shape), _SPELLING[t.dtype]) for n, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def quantized(self, name: str) -> WeightSource | None:
        return None


def opened(parts: dict[str, Any], packing: Packing) -> PackedTensors:
    return PackedTensors(Held({f"{NAME}.{last}": part for last, part in parts.items()}), packing)


def kept(source: WeightSource) -> NDArray[np.float32]:
    """The numbers of integers, scales and minimums, their columns where the inputs are."""
    made = source.read()
    assert made.integers.shape == source.shape
    assert (made.minimums is not None) == source.minimums
    found = dequantize(made.integers, made.scales, made.minimums)
    if source.order is None:
        return found
    back = np.empty_like(found)
    back[:, source.order] = found
    return back


def weights(seed: int, outputs: int = 24, inputs: int = 256) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)


@given(seed=st.integers(0, 2**31), size=st.sampled_from([32, 64, 128, 256]), symmetric=st.booleans())
def test_awq(seed: int, size: int, symmetric: bool) -> None:
    made = round_in_groups(weights(seed), 4, size, symmetric=symmetric)
    tensors = opened(awq_tensors(made), Packing("awq"))
    assert tensors.found[WEIGHT] == Stored(Path("model.safetensors"), (24, 256), "AWQ int4", packed=True)
    np.testing.assert_array_equal(tensors.read(WEIGHT).numpy(), made.numbers)
    source = tensors.quantized(WEIGHT)
    assert source is not None
    assert source.minimums is not symmetric
    np.testing.assert_allclose(kept(source), made.numbers, rtol=0, atol=4e-7 * float(np.abs(made.scales).max()) * 15)


@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([32, 128]),
    symmetric=st.booleans(),
    less_one=st.booleans(),
    act_order=st.booleans(),
)
def test_gptq(seed: int, bits: int, size: int, symmetric: bool, less_one: bool, act_order: bool) -> None:
    groups = np.random.default_rng(seed).permutation(256) // size if act_order else None
    made = round_in_groups(weights(seed), bits, size, symmetric=symmetric, groups=groups)
    tensors = opened(gptq_tensors(made, bits, less_one), Packing("gptq", zeros_less_one=less_one))
    np.testing.assert_array_equal(tensors.read(WEIGHT).numpy(), made.numbers)
    source = tensors.quantized(WEIGHT)
    assert source is not None
    assert (source.order is None) is not act_order
    assert source.minimums is not symmetric
    np.testing.assert_allclose(
        kept(source), made.numbers, rtol=0, atol=1e-7 * float(np.abs(made.scales).max()) * 2**bits
    )


def word(value: int) -> NDArray[np.int32]:
    return np.array([[value]], np.uint32).view(np.int32)


def test_a_word_of_awq() -> None:
    """AutoAWQ (`awq/modules/linear/gemm.py`) packs eight outputs so: place i, counted from the lowest bits, gets output
    `[0, 2, 4, 6, 1, 3, 5, 7][i]`."""
    parts = {"qweight": word(0xAC0E5973), "qzeros": word(0xF6E4D2C0), "scales": np.ones((1, 8), np.float16)}
    integers, zeros = [3, 14, 7, 0, 9, 12, 5, 10], [0, 4, 12, 14, 2, 6, 13, 15]
    found = opened(parts, Packing("awq")).read(WEIGHT)
    np.testing.assert_array_equal(found.numpy(), np.subtract(integers, zeros)[:, None])


@pytest.mark.parametrize(
    ("stored", "less_one", "zeros"),
    [
        # AutoGPTQ (`qlinear_cuda.py`, `pack`): `zeros -= 1`, then `qzeros |= zeros[:, j] << (bits * (j - i))`.
        (0x76543210, True, [1, 2, 3, 4, 5, 6, 7, 8]),
        (0x76543210, False, [0, 1, 2, 3, 4, 5, 6, 7]),
        # GPTQModel (`utils/model.py`, `convert_gptq_v2_to_v1_format_module`): 0x8888_8880 - 0x1111_1111; zero points
        # of 0 borrow from their neighbours.
        (0x7777776F, True, [0, 8, 8, 8, 8, 8, 8, 8]),
        (0xF7777777, True, [8, 8, 8, 8, 8, 8, 8, 0]),
    ],
)
def test_a_word_of_gptq(stored: int, less_one: bool, zeros: list[int]) -> None:
    qweight = np.tile(word(0x76543210), (1, 8))  # eight inputs of each output, the first in the lowest bits
    parts = {"qweight": qweight, "qzeros": word(stored), "scales": np.ones((1, 8), np.float16)}
    found = opened(parts, Packing("gptq", zeros_less_one=less_one)).read(WEIGHT)
    np.testing.assert_array_equal(found.numpy(), np.arange(8)[None] - np.array(zeros)[:, None])


@given(
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([32, 128, None]),
    symmetric=st.booleans(),
    kind=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_compressed_tensors(bits: int, size: int | None, symmetric: bool, kind: torch.dtype) -> None:
    parts, numbers = compressed_tensors(torch.from_numpy(weights(9)), bits, size, symmetric, kind)
    tensors = opened(parts, Packing("compressed-tensors"))
    np.testing.assert_array_equal(tensors.read(WEIGHT).numpy(), numbers)
    source = tensors.quantized(WEIGHT)
    assert source is not None
    assert (source.bits, source.minimums, source.order) == (bits, not symmetric, None)
    np.testing.assert_allclose(kept(source), numbers, rtol=0, atol=1e-7 * float(np.abs(numbers).max()) * 4)


def test_groups_that_no_32_inputs_share_have_no_form() -> None:
    made = round_in_groups(weights(2), 4, 16, symmetric=True)
    tensors = opened(awq_tensors(made), Packing("awq"))
    assert tensors.quantized(WEIGHT) is None
    np.testing.assert_array_equal(tensors.read(WEIGHT).numpy(), made.numbers)


def test_order_of_an_mlps_last_inputs_goes_into_the_outputs_before_it() -> None:
    rng, layer = np.random.default_rng(3), "model.layers.4.mlp"
    hidden, inner = 64, 96
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    made = {
        name: round_in_groups(weights(i, *shape), 4, 32, symmetric=False, groups=rng.permutation(shape[1]) // 32)
        for i, (name, shape) in enumerate(shapes.items())
    }
    held: dict[str, Any] = {
        f"{layer}.{n}.{last}": part for n, m in made.items() for last, part in gptq_tensors(m).items()
    }
    bias = rng.normal(size=inner).astype(np.float32)
    held[f"{layer}.gate_proj.bias"] = bias
    tensors = PackedTensors(Held(held), Packing("gptq", zeros_less_one=True))

    def parts(source: WeightSource | None, read: Tensor) -> tuple[NDArray[np.float32], WeightSource]:
        assert source is not None
        np.testing.assert_allclose(kept(source), read.numpy(), atol=1e-6)
        return kept(source).astype(np.float64), source

    (gate, first), (up, _), (down, last) = (
        parts(tensors.quantized(f"{layer}.{n}.weight"), tensors.read(f"{layer}.{n}.weight")) for n in shapes
    )
    assert first.order is not None
    assert last.order is None
    moved = tensors.read(f"{layer}.gate_proj.bias").numpy()
    assert not np.array_equal(moved, bias)
    x = rng.normal(size=(5, hidden))
    found = (np.maximum(x @ gate.T + moved, 0) * (x @ up.T)) @ down.T
    plain = {name: each.numbers.astype(np.float64) for name, each in made.items()}
    wanted = (np.maximum(x @ plain["gate_proj"].T + bias, 0) * (x @ plain["up_proj"].T)) @ plain["down_proj"].T
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def packed_weights(symmetric: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    made = round_in_groups(weights(1), 4, 32, symmetric=symmetric)
    return awq_tensors(made), gptq_tensors(made), compressed_tensors(torch.from_numpy(weights(1)), 4, 32, symmetric)[0]


(AWQ, GPTQ, COMPRESSED), (_, _, SYMMETRIC) = map(packed_weights, (False, True))


def declared(method: Any, **settings: object) -> Packing:
    """A packing whose settings stand under `q` of the file."""
    return Packing(method, zeros_less_one=method == "gptq", declared={f"q.{key}": v for key, v in settings.items()})


def group(number: int, target: str, bits: int, symmetric: bool, size: int | None = None) -> WeightGroup:
    return WeightGroup(f"config_groups.group_{number}", (target,), bits, symmetric, size)


def of_groups(*groups: WeightGroup) -> Packing:
    return Packing("compressed-tensors", groups=groups)


LINEAR, BY_PATTERN = group(0, "Linear", 4, False), group(1, "re:.*o_proj$", 4, True)
OTHER_ZEROS = gptq_tensors(round_in_groups(weights(1), 4, 32, symmetric=True), less_one=False)


@pytest.mark.parametrize(
    ("packing", "parts", "said"),
    [
        (Packing("awq"), {last: AWQ[last] for last in ("qweight", "scales")}, f"'{NAME}.qzeros' is missing"),
        (Packing("awq"), AWQ | {"qweight": AWQ["qweight"].astype(np.int64)}, "qweight' of AWQ is stored as I64"),
        (Packing("awq"), AWQ | {"scales": AWQ["scales"][:7]}, "scales' of AWQ has shape [7, 24], which does not"),
        (Packing("awq"), AWQ | {"weight": np.ones((24, 256), "f4")}, "weight' stands beside packed tensors of the"),
        (Packing("gptq"), GPTQ | {"g_idx": GPTQ["g_idx"][:8]}, "g_idx' of GPTQ has shape [8], expected [256]"),
        (Packing("gptq"), GPTQ | {"qzeros": np.zeros((8, 18), np.int32)}, "qzeros' of GPTQ has integers of 24 bits"),
        (of_groups(), COMPRESSED | {"weight_shape": np.array([24, 99])}, "which holds no [24, 99] integers"),
        (of_groups(), COMPRESSED | {"weight_scale": np.ones((24, 7), "f2")}, "weight_scale' of compressed-tensors has"),
        (declared("gptq", sym=True), OTHER_ZEROS, "has a zero point of 9, and q.sym is true, so that all are 8"),
        (declared("gptq", bits=8), GPTQ, "has integers of 4 bits, and q.bits is 8"),
        (declared("gptq", group_size=128), GPTQ, "has 8 groups for 256 inputs, and q.group_size is 128"),
        (declared("awq", zero_point=False), AWQ, "and q.zero_point is false, so that all are 8"),
        (declared("awq", zero_point=True, group_size=32, bits=4), AWQ, None),
        (of_groups(LINEAR), COMPRESSED, None),
        (of_groups(LINEAR), SYMMETRIC, f"'{NAME}.weight_zero_point' is missing, and config_gr"),
        (of_groups(LINEAR, BY_PATTERN), SYMMETRIC, None),
        (of_groups(LINEAR, BY_PATTERN), COMPRESSED, "has zero points, and config_groups.group_1"),
        (of_groups(LINEAR, group(2, NAME, 8, True)), SYMMETRIC, "and config_groups.group_2 has 8"),
        (of_groups(group(3, "Linear", 4, True, 64)), SYMMETRIC, "those of config_groups.group_3"),
        (of_groups(group(4, "re:lm_head", 8, False)), SYMMETRIC, None),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_each_other_or_the_settings_are_named(
    packing: Packing, parts: dict[str, Any], said: str | None
) -> None:
    words = None if said is None else f"model.safetensors.*{re.escape(said)}"
    with nullcontext() if words is None else pytest.raises(CheckpointError, match=words):
        opened(parts, packing)


def test_groups_of_a_configuration() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "symmetric": False}}
    other = {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "strategy": "group"}}

    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}

    def read(**changes: object) -> Packing | None:
        groups = {"a": group | changes, "b": other}
        return read_packing({"quantization_config": settings | {"config_groups": groups}}, Path("config.json"))

    found = read()
    assert found is not None
    assert found.groups == (
        WeightGroup("quantization_config.config_groups.a", ("Linear",), 4, False),
        WeightGroup("quantization_config.config_groups.b", ("re:.*down_proj$",), 8, True),
    )
    assert read_packing({}, Path("config.json")) is None
    place = "config.json: quantization_config.config_groups.a"
    with pytest.raises(CheckpointError, match=rf"{place}.targets has 're:\(', no regular expression"):
        read(targets=["re:("])


def test_a_minimum_that_is_not_finite_is_refused() -> None:
    """Though its scale and zero point are."""
    for kind in (torch.float32, torch.bfloat16):
        source = opened(GPTQ | {"scales": torch.full((8, 24), 3e38, dtype=kind)}, Packing("gptq")).quantized(WEIGHT)
        assert source is not None
        with pytest.raises(CheckpointError, match=rf"zero points of '{NAME}' times their scales are not finite"):
            source.read()


def test_values_that_cannot_be_are_named() -> None:
    for change, said in (
        ({"g_idx": GPTQ["g_idx"] + 1}, "names groups from 1 to 8, and there are 8"),
        ({"scales": np.full((8, 24), np.inf, np.float16)}, "not finite"),
    ):
        with pytest.raises(CheckpointError, match=said):
            opened(GPTQ | change, Packing("gptq")).read(WEIGHT)
