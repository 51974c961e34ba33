"""An oracle with a plan's quantised weights, and what quantising costs against the checkpoint.

A plan with quantised weights rounds twice: weights when it is built, and each row of activations as it runs. The
oracle gets the same weights, which are float32 numbers again, and does not round activations: emulating
that brings it no nearer, because a last bit turns some roundings over, and these turn over more in the next layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from compiler.models.decoder import Decoder
from compiler.quantization.rounding import round_to_nearest
from compiler.quantization.weight_form import WeightForm
from plugins.quant_layout import BLOCK
from plugins.reference import dequantize

QUANTIZED_LOGIT_BOUND = 0.5
"""Largest difference of two logits (of some tens) that the rounding of activations to 255 steps explains.

On the reference model it is 0.11 at the median position and 0.21 at most, of 512. A wrong weight, mask or position is
off by units.
"""

_EMBEDDINGS, _HEAD = ("embedding", "embed_tokens.weight"), "lm_head.weight"


def round_weights(model: nn.Module, form: WeightForm, kept: Collection[str] = ()) -> None:
    """Give `model`, one of transformers' or our decoder, the weights of a plan of that form, in place.

    Parameters in `kept` stay: the plan has the integers of the checkpoint, and they stand for these numbers.
    """
    for name, parameter in model.named_parameters():
        table = name.endswith(_EMBEDDINGS)
        bits = form.head_bits if table or name.endswith(_HEAD) else form.bits
        if parameter.ndim != 2 or bits is None or name in kept:
            continue
        turned = isinstance(model, Decoder) and not table  # it stores projections [in, out]
        weight = (parameter.data.T if turned else parameter.data).contiguous().numpy()
        if weight.shape[1] % BLOCK == 0:
            made = round_to_nearest(weight, bits)
            rounded = torch.from_numpy(dequantize(made.integers, made.scales, made.minimums))
            parameter.data.copy_(rounded.T if turned else rounded)


@dataclass
class QuantizationCheck:
    """How far quantised weights move the model from its checkpoint in float32.

    Along the plan's own tokens: `kl` is the mean divergence of its distributions from the checkpoint's, in nats, and
    `same_tokens` the share of positions at which the checkpoint would have chosen the same token. On the held-out
    prompts: `bits_per_byte` of the oracle with the plan's weights, and `float_bits_per_byte` of the checkpoint.
    """

    positions: int = 0
    kl: float = 0.0
    same_tokens: float = 0.0
    bytes: int = 0
    bits_per_byte: float = 0.0
    float_bits_per_byte: float = 0.0

    @property
    def growth(self) -> float:
        """By how much more bits a byte takes, as a share."""
        return self.bits_per_byte / self.float_bits_per_byte - 1 if self.float_bits_per_byte else 0.0

    def add_run(self, plan: Tensor, checkpoint: Tensor) -> None:
        """Take in logits `[M, vocab]` of the same positions."""
        own, other = plan.double().log_softmax(-1), checkpoint.double().log_softmax(-1)
        found = float((other.exp() * (other - own)).sum())
        same = int((plan.argmax(-1) == checkpoint.argmax(-1)).sum())
        before, self.positions = self.positions, self.positions + len(plan)
        self.kl = (self.kl * before + found) / self.positions
        self.same_tokens = (self.same_tokens * before + same) / self.positions

    def add_text(self, token_ids: list[int], size: int, plan: Tensor, checkpoint: Tensor) -> None:
        """Take in logits `[N, vocab]` of a text of N tokens, `size` bytes behind the first."""
        total = self.bytes + size
        if not total:
            return

        def mean(before: float, logits: Tensor) -> float:
            chosen = logits[:-1].double().log_softmax(-1)[torch.arange(len(token_ids) - 1), token_ids[1:]]
            return (before * self.bytes - float(chosen.sum()) / float(np.log(2))) / total

        self.bits_per_byte = mean(self.bits_per_byte, plan)
        self.float_bits_per_byte = mean(self.float_bits_per_byte, checkpoint)
        self.bytes = total

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"growth": self.growth}
