"""An oracle with a plan's quantised weights, and what quantising costs against the checkpoint.

A plan with quantised weights rounds twice: weights when it is built, and each row of activations as it runs. The
oracle gets the same weights, which are float32 numbers again, and does not round activations: emulating
that brings it no nearer, because a last bit turns some roundings over, and these turn over more in the next layer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from outrider.compiler.calibrated import calibrate_by_recipe
from outrider.compiler.checkpoint import defer_decoder, stored_name
from outrider.compiler.deferred import deferred, parts_of
from outrider.compiler.fused_tensors import fused_parts
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.families import FAMILIES
from outrider.compiler.quantization.calibration import CalibratedTensors
from outrider.compiler.quantization.error_feedback import numbers
from outrider.compiler.quantization.graph import GATES
from outrider.compiler.quantization.keeping import kept_parameters
from outrider.compiler.quantization.rounding import round_to_nearest
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.recipe import Recipe
from outrider.compiler.text import read_text
from outrider.plugins.quant_layout import BLOCK

QUANTIZED_LOGIT_BOUND = 0.5
"""Largest difference of two logits (of some tens) that the rounding of activations to 255 steps explains.

On the reference model it is 0.11 at the median position and 0.21 at most, of 512. A wrong weight, mask or position is
off by units.
"""

_EMBEDDINGS, _HEAD = ("embedding", "embed_tokens.weight"), "lm_head.weight"
# Which choose experts, or make the gates of a state, and stay as they are.
_UNTOUCHED = (".experts.router", ".mlp.gate.weight", ".mlp.router.weight", ".in_proj_a.weight", ".in_proj_b.weight")


@dataclass(frozen=True)
class PlanWeights:
    """The weights of a plan.

    `searched` has those that were searched on text. Of the others, the checkpoint's `kept` ones, by their names there,
    stay: the plan has their integers, which stand for these numbers. The rest is rounded to the nearest.
    """

    form: WeightForm
    kept: frozenset[str] = frozenset()
    searched: CalibratedTensors | None = None

    def give(self, model: nn.Module) -> None:
        """Give `model`, one of transformers' or our decoder, these weights, in place."""
        own = isinstance(model, Decoder)
        family = FAMILIES[model.config.family if own else model.config.model_type]  # type: ignore[union-attr, index]
        for name, parameter in model.named_parameters():
            table = name.endswith(_EMBEDDINGS)
            is_stacked = name.rpartition(".")[2] in family.stacked
            turned = is_stacked or (own and parameter.ndim > 1 and not table)  # it has projections [in, out]
            stored = stored_name(family.name, name) if own else name
            parts = fused_parts(stored, family.fused)
            if self.searched is not None and any(map(self.searched.changed, parts)):
                offset = family.norm_offset if own and name.endswith("norm.weight") else 0.0  # the decoder has added it
                values = torch.cat([self.searched.read(part) for part in parts])
                parameter.data.copy_(values.T if turned else values + offset)
            elif stored not in self.kept and not name.endswith((*_UNTOUCHED, "bias", *GATES)):
                weight = parameter.data.transpose(-1, -2) if turned else parameter.data
                values = self._rounded(weight, table or name.endswith(_HEAD))
                parameter.data.copy_(values.transpose(-1, -2) if turned else values)

    def _rounded(self, weight: Tensor, head: bool) -> Tensor:
        """Round a matrix `[N, K]`, or those of all experts `[E, N, K]`, of which N too must be of whole blocks."""
        bits = self.form.head_bits if head else self.form.bits
        if (
            weight.ndim < 2
            or bits is None
            or any(size % BLOCK for size in weight.shape[-1 if weight.ndim == 2 else 1 :])
        ):
            return weight
        rows = weight.reshape(-1, weight.shape[-1])
        return numbers(round_to_nearest(rows.contiguous().numpy(), bits)).view(weight.shape)


def plan_weights(recipe: Recipe) -> PlanWeights | None:
    """Return the quantised weights that a plan of the recipe has for the target; None where it has none.

    A search is made again as the build made it, so that what the plan does with its outcome is seen.
    """
    weights = recipe.target.weights
    if weights is None:
        return None
    decoder = defer_decoder(recipe.checkpoint_path, "float32", recipe.rope_scaling, recipe.capacity.context)
    stored, own = deferred(decoder), kept_parameters(decoder, weights.form)
    kept = frozenset(part.stored_name for name in own for part in parts_of(stored[name]))
    text = read_text(recipe.checkpoint_path, decoder.config)
    return PlanWeights(weights.form, kept, calibrate_by_recipe(decoder, recipe, weights, text))


@dataclass
class QuantizationCheck:
    """How far quantised weights move the model from its checkpoint in float32.

    Along the plan's own tokens: `kl` is the mean divergence of its distributions from the checkpoint's, in nats, and
    `same_tokens` the share of positions at which the checkpoint would have chosen the same token. On `texts` held-out
    prompts: `bits_per_byte` of the oracle with the plan's weights, and `float_bits_per_byte` of the checkpoint.
    """

    positions: int = 0
    kl: float = 0.0
    same_tokens: float = 0.0
    texts: int = 0
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
        """Take in logits `[N, vocab]` of a text of N tokens, `size` bytes after the first."""
        total = self.bytes + size
        if not total:
            return

        def mean(before: float, logits: Tensor) -> float:
            chosen = logits[:-1].double().log_softmax(-1)[torch.arange(len(token_ids) - 1), token_ids[1:]]
            return (before * self.bytes - float(chosen.sum()) / float(np.log(2))) / total

        self.bits_per_byte = mean(self.bits_per_byte, plan)
        self.float_bits_per_byte = mean(self.float_bits_per_byte, checkpoint)
        self.bytes = total
        self.texts += 1

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"growth": self.growth}
