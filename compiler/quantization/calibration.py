"""Quantised weights of a decoder, chosen on text: method `awq` of a recipe.

Layer by layer: collect the moments of every product's inputs on the text, with the layers before as they are quantised;
search scales of the inputs and fold them; round. One layer is in float32 at a time, beside the text's hidden states.
What comes out is a `TensorSource` like a quantised checkpoint's, so that graphs and oracles read the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.compiler.deferred import StoredTensor, deferred, rebind
from outrider.compiler.models.decoder import Decoder, DecoderLayer, Linear, RmsNorm
from outrider.compiler.models.eager import CausalExecution
from outrider.compiler.quantization.channel_scales import GROUPS, Group, copies_of, fold, search_scales, spread
from outrider.compiler.quantization.error_feedback import numbers, one_thread, round_with_feedback
from outrider.compiler.quantization.form import QuantizedWeight, WeightSource, stack
from outrider.compiler.quantization.moments import Moments, MomentSums
from outrider.compiler.quantization.rounding import too_large
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.tensor_source import Stored, TensorSource
from outrider.plans.errors import CheckpointError
from outrider.plugins.quant_layout import BLOCK, QuantLayout, pack, unpack

_HEAD_BITS = 4
"""Bits below which the head's rounding is felt: with 8 the reference loses 0.002 %, with 4 0.25 %."""
_SLICE = 1 << 24  # numbers of the head rounded at once

Progress = Callable[[int], None]
"""Called with the index of the layer that begins."""


class CalibratedTensors:
    """A checkpoint's tensors with quantised weights, and with norms and biases that the scales are folded into."""

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors
        self._weights: dict[str, WeightSource] = {}
        self._floats: dict[str, Tensor] = {}

    @property
    def found(self) -> Mapping[str, Stored]:
        return self._tensors.found

    def read(self, name: str) -> Tensor:
        """Read a tensor as floats; a quantised one is what its integers stand for."""
        if (source := self._weights.get(name)) is not None:
            return numbers(source.read())
        return self._floats[name].clone() if name in self._floats else self._tensors.read(name)

    def quantized(self, name: str) -> WeightSource | None:
        """Return the integers and scales of a weight: those chosen, or where it was left alone the checkpoint's own."""
        return self._weights.get(name) if self.changed(name) else self._tensors.quantized(name)

    def changed(self, name: str) -> bool:
        """Return whether the tensor is another than the checkpoint's."""
        return name in self._weights or name in self._floats

    def keep_weight(self, name: str, weight: QuantizedWeight) -> None:
        """Take in a quantised weight; it is kept packed."""
        bits, (outputs, inputs) = weight.bits, weight.integers.shape
        layout = QuantLayout(outputs, inputs, bits, wide=False, minimums=False)
        packed = pack(weight.integers, weight.scales, None, layout)
        self._weights[name] = WeightSource(
            bits, (outputs, inputs), False, lambda: QuantizedWeight(bits, *unpack(packed, layout))
        )

    def keep_floats(self, name: str, values: Tensor) -> None:
        """Take in values that scales are folded into, in the checkpoint's layout."""
        self._floats[name] = values


@torch.no_grad()
def calibrate(
    decoder: Decoder, texts: Sequence[Sequence[int]], form: WeightForm, progress: Progress = lambda _: None
) -> CalibratedTensors:
    """Choose the weights of `form` of a deferred `decoder` on token ids `texts`, and bind the decoder to them.

    The same inputs give the same bits on one machine; another number of threads, or another processor, may round a
    moment's last bit otherwise, and then choose otherwise between two scales that are equally good. Raises
    `CheckpointError` for a checkpoint that has integers already, and for weights too large for scales in float16.
    """
    stored = _unstacked(decoder)
    if not form.requantize:
        _check_floats(stored)
    tensors = CalibratedTensors(stored["embedding"].tensors)
    embedding = stored["embedding"].read_stored()
    scale = decoder.config.embedding_scale
    hidden = [F.embedding(torch.tensor(ids), embedding).float() * scale for ids in texts]
    del embedding
    executions = [CausalExecution(decoder.config, 1, len(ids)) for ids in texts]
    for index in range(decoder.config.num_layers):
        progress(index)
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
        layer = _load(decoder, own)
        _calibrate_layer(layer, own, hidden, executions, form.bits, tensors)
        hidden = [layer(h, index, execution) for h, execution in zip(hidden, executions, strict=True)]
    if form.head_bits is not None and form.head_bits <= _HEAD_BITS:
        _round_head(decoder, stored, hidden, form.head_bits, tensors)
    rebind(decoder, tensors)
    return tensors


def calibrate_layer(
    layer: DecoderLayer, hidden: Sequence[Tensor], executions: Sequence[CausalExecution], bits: int
) -> dict[str, QuantizedWeight]:
    """Scale and round the products of `layer`, in place, for the hidden states `[n, H]` that enter it.

    Returns the quantised weights by product. Products whose inputs are no multiple of 32 stay as they are.
    """
    moments = _moments(layer, hidden, executions)
    for group in moments:
        if getattr(layer, group.maker) is None:
            continue
        copies = copies_of(layer.config, group)
        with one_thread():
            scales = search_scales(_joined(layer, group), moments[group], bits, copies)
        fold(layer, group, scales)
        moments[group] = moments[group].divided(spread(scales, copies))
    made = {}
    for group, seen in moments.items():
        rounded = round_with_feedback(_joined(layer, group), seen, bits)
        first = 0
        for name in group.products:
            product: Linear = getattr(layer, name)
            rows = slice(first, first + product.weight.shape[1])
            made[name] = QuantizedWeight(bits, rounded.integers[rows], rounded.scales[rows])
            product.weight.copy_(numbers(made[name]).T)
            first = rows.stop
    return made


def _calibrate_layer(
    layer: DecoderLayer,
    stored: Mapping[str, StoredTensor],
    hidden: Sequence[Tensor],
    executions: Sequence[CausalExecution],
    bits: int,
    tensors: CalibratedTensors,
) -> None:
    for name, values in layer.named_parameters():
        if values.ndim == 2:
            _check_size(stored[name], values, bits)
    made = calibrate_layer(layer, hidden, executions, bits)
    for name, values in layer.named_parameters():
        product, _, kind = name.rpartition(".")
        if kind == "weight" and product in made:
            tensors.keep_weight(stored[name].stored_name, made[product])
        else:
            tensors.keep_floats(stored[name].stored_name, stored[name].as_stored(values))


def _moments(
    layer: DecoderLayer, hidden: Sequence[Tensor], executions: Sequence[CausalExecution]
) -> dict[Group, Moments]:
    """Return the moments of the inputs of the groups that can be quantised, when the layer runs on `hidden`."""
    sums, hooks = {}, []
    for group in GROUPS:
        first: Linear = getattr(layer, group.products[0])
        if len(first.weight) % BLOCK:
            continue
        sums[group] = MomentSums(len(first.weight))
        add = sums[group].add
        hooks.append(first.register_forward_pre_hook(lambda _, given, add=add: add(given[0])))
    for h, execution in zip(hidden, executions, strict=True):
        layer(h, 0, execution)
    for hook in hooks:
        hook.remove()
    return {group: each.moments() for group, each in sums.items()}


def _joined(layer: DecoderLayer, group: Group) -> Tensor:
    """Return the weights of a group as one, f32 `[N, K]`."""
    return torch.cat([getattr(layer, name).weight.T for name in group.products]).contiguous()


def _load(decoder: Decoder, stored: Mapping[str, StoredTensor]) -> DecoderLayer:
    """Read a layer in float32."""
    with torch.device("meta"):
        layer = DecoderLayer(decoder.config)
    layer.load_state_dict({name: tensor.read().float() for name, tensor in stored.items()}, assign=True)
    return layer.requires_grad_(False).eval()


def _round_head(
    decoder: Decoder,
    stored: Mapping[str, StoredTensor],
    hidden: Sequence[Tensor],
    bits: int,
    tensors: CalibratedTensors,
) -> None:
    """Round the head, or the embedding that is the head too, for the normed hidden states that it reads."""
    c = decoder.config
    head = stored["embedding" if c.tie_embeddings else "lm_head.weight"]
    if c.hidden_size % BLOCK:
        return
    norm = RmsNorm(c.hidden_size, c.rms_norm_eps)
    norm.weight.copy_(stored["norm.weight"].read())
    sums = MomentSums(c.hidden_size)
    for h in hidden:
        sums.add(norm(h))
    moments = sums.moments()
    weight = head.read_stored()
    _check_size(head, weight, bits)
    parts = torch.split(weight, max(1, _SLICE // c.hidden_size))
    tensors.keep_weight(head.stored_name, stack([round_with_feedback(p.float(), moments, bits) for p in parts]))


def _unstacked(decoder: Decoder) -> dict[str, StoredTensor]:
    """Return the stored tensors of `decoder`. Raises `CheckpointError` for experts and convolutions, which are
    not searched."""
    found = {}
    if decoder.config.conv is not None:
        raise CheckpointError(
            f"a {decoder.config.family} model has layers that convolve, which method awq does not search; leave "
            "`method` out of the recipe, so that weights are rounded to the nearest"
        )
    for name, tensor in deferred(decoder).items():
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(
                f"{tensor.parts[0].origin} is of an expert, and method awq does not search a mixture of experts; leave "
                "`method` out of the recipe, so that weights are rounded to the nearest"
            )
        found[name] = tensor
    return found


def _check_floats(stored: Mapping[str, StoredTensor]) -> None:
    for tensor in stored.values():
        if tensor.tensors.found[tensor.stored_name].packed:
            raise CheckpointError(
                f"{tensor.origin} is stored as integers, which method awq would round again; leave `method` out of the "
                "recipe to keep them, or set `requantize` to true"
            )


def _check_size(stored: StoredTensor, weight: Tensor, bits: int) -> None:
    """Raise `CheckpointError` for weights that need scales too large for float16."""
    largest = float(weight.abs().max())
    if largest > torch.finfo(torch.float16).max * (1 << (bits - 1)) / 2:
        raise too_large(stored.origin, largest, bits)
