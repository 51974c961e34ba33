"""Weights that a checkpoint stores as integers: which of them a plan keeps, and which it would have to round again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from outrider.compiler.deferred import StoredTensor, deferred
from outrider.compiler.quantization.form import WeightSource
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plugins.quant_layout import BLOCK

_HEAD = ("lm_head.weight", "embedding")


def kept(tensor: StoredTensor, bits: int | None) -> WeightSource | None:
    """Return the weight as the checkpoint stores it, where that is as integers of blocks of 32 and at most `bits`."""
    source = tensor.tensors.quantized(tensor.stored_name)
    if source is None or (bits is not None and bits < source.bits):
        return None
    return replace(source, origin=tensor.origin) if tensor.tensors.found[tensor.stored_name].packed else source


def kept_parameters(module: nn.Module, form: WeightForm | None) -> set[str]:
    """Return the names of the parameters of a deferred `module` whose integers a plan of `form` keeps."""
    return {name for name, tensor in _unstacked(module) if kept(tensor, _bits(name, form)) is not None}


def reason_against(module: nn.Module, form: WeightForm | None) -> str | None:
    """Return why a plan cannot have the weights of `module` in `form` without rounding integers again, as a clause.

    None where it can, or where `form` allows it. Without a `form` weights stay as the checkpoint stores them.
    """
    if form is not None and form.requantize:
        return None
    for name, tensor in _unstacked(module):
        stored = tensor.tensors.found[tensor.stored_name]
        if not stored.packed or len(stored.shape) != 2:
            continue
        bits = _bits(name, form)
        source = tensor.tensors.quantized(tensor.stored_name)
        where = f"{stored.file} stores {tensor.stored_name!r} as {stored.dtype}"
        if source is None:
            return f"{where}, in groups that no blocks of {BLOCK} inputs hold"
        if bits is not None and bits < source.bits:
            return f"{where}, integers of {source.bits} bits, and int{bits} is asked for"
    return None


def with_minimums(module: nn.Module, form: WeightForm | None) -> str | None:
    """Return which weight of `module` keeps integers that have minimums, as a clause; None where none does."""
    for name, tensor in _unstacked(module):
        source = kept(tensor, _bits(name, form))
        if source is not None and source.minimums:
            stored = tensor.tensors.found[tensor.stored_name]
            return f"{stored.file} stores {tensor.stored_name!r} as {stored.dtype}, unsigned integers with minimums"
    return None


def _unstacked(module: nn.Module) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the deferred parameters without the stacked ones, which no checkpoint that is read stores as integers."""
    for name, tensor in deferred(module).items():
        if isinstance(tensor, StoredTensor):
            yield name, tensor


def _bits(name: str, form: WeightForm | None) -> int | None:
    """Return the bits that `form` asks of a parameter."""
    return None if form is None else form.head_bits if name.endswith(_HEAD) else form.bits
