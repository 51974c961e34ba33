"""Quantised weights searched on text: what they keep, and that they never cost more than rounding to the nearest."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.compiler.checkpoint import defer_decoder, load_decoder, stored_name
from outrider.compiler.deferred import deferred
from outrider.compiler.models.decoder import Decoder, DecoderLayer
from outrider.compiler.models.eager import CausalExecution, sequence_logits
from outrider.compiler.quantization.calibration import CalibratedTensors, calibrate, calibrate_layer
from outrider.compiler.quantization.channel_scales import GROUPS, copies_of, fold
from outrider.compiler.quantization.error_feedback import numbers, round_with_feedback
from outrider.compiler.quantization.form import QuantizedWeight, WeightSource
from outrider.compiler.quantization.moments import Moments, MomentSums
from outrider.compiler.quantization.rounding import round_to_nearest
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plans.errors import CheckpointError
from tests.compiler.conftest import MakeCheckpoint

TEXTS = [[(37 * i + 11 * t) % 299 + 1 for i in range(90)] for t in range(4)]


def inputs(count: int, size: int, seed: int = 0) -> Tensor:
    """Inputs that vary together, some much larger than others."""
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, size, generator=rng) @ torch.randn(size, size, generator=rng) / size**0.5
    return mixed * torch.exp(torch.randn(size, generator=rng))


def moments_of(x: Tensor) -> Moments:
    sums = MomentSums(x.shape[1])
    for part in torch.split(x, 50):
        sums.add(part)
    return sums.moments()


def weights(outputs: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(outputs, size, generator=torch.Generator().manual_seed(seed))


def test_inputs_and_weights_that_are_zero_do_no_harm() -> None:
    x = inputs(100, 64)
    x[:, :40] = 0
    weight = weights(6, 64)
    weight[1] = 0
    made = round_with_feedback(weight, moments_of(x), 4)
    assert np.isfinite(made.scales).all()
    assert not made.scales[1].any()
    assert not made.integers[1].any()
    none = round_with_feedback(weight, moments_of(x * 0), 4)
    assert np.isfinite(none.scales).all()
    assert (numbers(none) - weight).abs().max() < 0.5 * weight.abs().max()


# Matrices.


@pytest.mark.parametrize("bits", [4, 8])
def test_no_output_moves_more_than_with_the_nearest_steps(bits: int) -> None:
    weight, moments = weights(200, 160), moments_of(inputs(600, 160))
    made = round_with_feedback(weight, moments, bits)
    found = moments.cost(weight - numbers(made))
    assert np.array_equal(made.scales, made.scales.astype(np.float16).astype(np.float32))
    nearest = moments.cost(weight - numbers(round_to_nearest(weight.numpy(), bits)))
    assert (found <= nearest).all()
    assert found.sum() < (0.5 if bits == 4 else 0.8) * nearest.sum()


# Layers and models.


@pytest.fixture
def decoder(toy_recipe: Path) -> Decoder:
    return load_decoder(toy_recipe.parent / "target")


def layer_of(decoder: Decoder) -> DecoderLayer:
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    return layer


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2", "granite"])
def test_folded_scales_change_nothing(make_checkpoint: MakeCheckpoint, tmp_path: Path, family: str) -> None:
    """Biases too, and heads that share KV."""
    changes: dict[str, object] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    make_checkpoint(family, head_dim=8, pad_token_id=0, **changes)
    model = load_decoder(tmp_path)
    ids = list(range(3, 40))
    wanted = sequence_logits(model, ids)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer)
            for group in GROUPS:
                if getattr(layer, group.maker) is None:
                    continue
                _, count = copies_of(layer.config, group)
                size = getattr(layer, group.products[0]).weight.shape[0] // count
                fold(layer, group, torch.exp(torch.randn(size, generator=rng) / 2))
    torch.testing.assert_close(sequence_logits(model, ids), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_searched_layer_moves_less_than_a_rounded_one(decoder: Decoder, bits: int) -> None:
    layer, c = layer_of(decoder), decoder.config
    with torch.no_grad():
        hidden = [decoder.embedding[ids] for ids in TEXTS]
        executions = [CausalExecution(c, 1, len(ids)) for ids in TEXTS]

        def outputs(of: DecoderLayer) -> Tensor:
            return torch.cat([of(h, 0, e) for h, e in zip(hidden, executions, strict=True)])

        wanted = outputs(layer)
        rounded, searched = (DecoderLayer(c).requires_grad_(False) for _ in range(2))
        for each in (rounded, searched):
            each.load_state_dict(layer.state_dict())
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            weight = getattr(rounded, name).weight
            weight.copy_(numbers(round_to_nearest(weight.T.contiguous().numpy(), bits)).T)
        made = calibrate_layer(searched, hidden, executions, bits)
        assert set(made) == {"q", "k", "v", "o", "gate", "up", "down"}
        off = [float((outputs(each) - wanted).square().mean()) for each in (searched, rounded)]
    assert off[0] < (0.7 if bits == 4 else 1.0) * off[1]


def calibrated(checkpoint: Path, form: WeightForm) -> tuple[Decoder, Decoder]:
    """A deferred decoder bound to searched weights, and the same read."""
    found = defer_decoder(checkpoint)
    calibrate(found, TEXTS, form)
    read = load_decoder(checkpoint)
    read.load_state_dict({name: stored.read() for name, stored in deferred(found).items()})
    return found, read


def test_integers_that_are_left_alone_are_the_checkpoints() -> None:
    """A head of 8 bits is not searched; a norm that scales were folded into has no integers."""
    source = WeightSource(8, (2, 32), False, lambda: QuantizedWeight(8, np.ones((2, 32), np.int8), np.ones((2, 1))))

    class Stored:
        found: ClassVar[dict[str, object]] = {}

        def quantized(self, name: str) -> WeightSource | None:
            return source if name == "head" else None

    tensors = CalibratedTensors(Stored())  # type: ignore[arg-type]
    tensors.keep_floats("norm", torch.ones(2))
    assert tensors.quantized("head") is source
    assert tensors.quantized("norm") is None


def test_products_whose_inputs_are_no_multiple_of_32_stay_as_they_are(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    make_checkpoint("qwen2", vocab_size=300)  # 48 inputs of the product down
    found, read = calibrated(tmp_path, WeightForm(4, 8))
    plain, source = load_decoder(tmp_path), deferred(found)["layers.0.down.weight"].tensors
    assert source.quantized(stored_name("qwen2", "layers.0.down.weight")) is None
    assert source.quantized(stored_name("qwen2", "layers.0.up.weight")) is not None
    assert torch.equal(layer_of(read).down.weight, layer_of(plain).down.weight)
    assert torch.isfinite(sequence_logits(read, TEXTS[0])).all()


def test_weights_too_large_for_float16_scales_are_refused_by_name(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model = make_checkpoint("llama", vocab_size=300)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 1e7
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight' has values of 1e\+07, too large"):
        calibrate(defer_decoder(tmp_path), TEXTS, WeightForm(4, 8))
