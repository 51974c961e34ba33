"""EAGLE3 heads in speculators' layout: the same head, under other names, described by two nested objects.

It is read strictly (`known_keys`): its keys are those of speculators' `Eagle3SpeculatorConfig` and of a Llama layer.

A surprise: speculators always names the layer that a stream enters, under a key whose first id otherwise decides how it
is read (`eagle3_taps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.compiler.eagle3_taps import default_taps
from outrider.compiler.known_keys import (
    ABOUT,
    DECODER,
    GEOMETRY,
    HARMLESS,
    TYPE,
    WINDOW,
    object_of,
    read_about,
    refuse_unknown,
)
from outrider.compiler.models.eagle3_config import TAPS, Taps
from outrider.compiler.models.quantization import SETTINGS
from outrider.compiler.slots import Slot
from outrider.plans.errors import CheckpointError

KIND = "an EAGLE3 head as speculators writes it"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_OUTER = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "norm_before_residual")
_BIASES = ("attention_bias", "mlp_bias")
_KNOWN = {TYPE, DECODER, ABOUT, _TAPS, "norm_before_fc", *_OUTER, *SETTINGS} | HARMLESS
_KNOWN_INNER = GEOMETRY | HARMLESS | WINDOW | {*_BIASES, *SETTINGS}


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json with the values `raw` is in speculators' layout."""
    return raw.get(TYPE) is not None


def flattened(file: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json that other projects would write for this head.

    Raises `CheckpointError` for another kind of drafter, for a key that is not known, and for heads that the EAGLE3
    module does not compute.
    """
    if raw[TYPE] != "eagle3":
        raise CheckpointError(f"{file}: {TYPE} is {raw[TYPE]!r}, expected 'eagle3' of an EAGLE3 head")
    if raw.get("norm_before_fc"):
        raise CheckpointError(f"{file}: norm_before_fc is on; such heads cannot be compiled")
    refuse_unknown(file, "", raw, _KNOWN)
    read_about(file, raw)
    inner = object_of(file, raw, DECODER)
    if inner.get("model_type") != "llama":
        raise CheckpointError(
            f"{file}: {DECODER}.model_type is {inner.get('model_type')!r}; only EAGLE3 heads with a layer of llama "
            "can be compiled"
        )
    key = next((key for key in SETTINGS if inner.get(key)), None)
    if key is not None:
        raise CheckpointError(
            f"{file}: {DECODER}.{key} describes quantised weights, and those of a head are described by {key} beside "
            f"{DECODER}; move it there, or remove it where the head's weights are floats"
        )
    refuse_unknown(file, f"{DECODER}.", inner, _KNOWN_INNER)
    bias = next((key for key in _BIASES if inner.get(key)), None)
    if bias is not None:
        raise CheckpointError(
            f"{file}: {DECODER}.{bias} is {inner[bias]!r}; EAGLE3 heads with biases cannot be compiled"
        )
    return {**inner, **{key: raw[key] for key in _OUTER if raw.get(key) is not None}}


def read_speculators_taps(file: Path, raw: Mapping[str, Any], layers: int) -> Taps:
    """Return the taps that `raw` names for a target of `layers` layers, or default.

    Raises `CheckpointError` unless they are three different layers.
    """
    ids = raw.get(_TAPS)
    if ids is None:
        return default_taps(layers)
    numbers = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)] if isinstance(ids, list) else []
    whole = isinstance(ids, list) and len(ids) == len(set(numbers)) == TAPS
    if not whole or not all(0 <= i < layers for i in numbers):
        raise CheckpointError(
            f"{file}: {_TAPS} must be {TAPS} different layers from 0 to {layers - 1} of the target, found {ids!r}"
        )
    return Taps(tuple(numbers), f"{_TAPS} {ids}, indices of hidden_states, as speculators writes them")


def speculators_name(name: str) -> str:
    """Return speculators' name of a tensor that other projects call `name`."""
    return name.replace("midlayer.", "layers.0.")


def tensors_of_training(draft_vocab: int, hidden: int) -> dict[str, Slot]:
    """Return the tensors that speculators may store beside a head's: the target's last norm and output weights, which
    training compares with."""
    return {
        "verifier_norm.weight": Slot("", (hidden,)),
        "verifier_lm_head.weight": Slot("", (draft_vocab, hidden)),
    }
