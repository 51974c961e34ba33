"""EAGLE3 heads in speculators' layout: the same head, under other names, described by two nested objects.

It is read strictly (`known_keys`): its keys are those of speculators' `Eagle3SpeculatorConfig` and of a Llama layer.

A surprise: speculators always names the layer that a stream enters, under a key whose first id otherwise decides how it
is read (`eagle3_taps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from outrider.compiler.eagle3_taps import default_taps, name_taps
from outrider.compiler.known_keys import DECODER, GEOMETRY, HARMLESS, TYPE, WINDOW, SpeculatorsKeys, StrictKeys
from outrider.compiler.models.eagle3_config import TAPS, Taps
from outrider.compiler.models.quantization import SETTINGS

KIND = "an EAGLE3 head as speculators writes it"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_OUTER = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "norm_before_residual")


class _Layer(StrictKeys):
    ignored = (GEOMETRY | HARMLESS | WINDOW) - {"model_type", "attention_bias"}

    model_type: Literal["llama"]
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    quantization_config: Any = None
    compression_config: Any = None

    @model_validator(mode="after")
    def _check_floats(self) -> Self:
        """The verifier's own configuration may have been copied here."""
        key = next((key for key in SETTINGS if getattr(self, key)), None)
        if key is not None:
            raise ValueError(
                f"{key} describes quantised weights, and those of a head are described beside {DECODER}; move it "
                "there, or remove it where the head's weights are floats"
            )
        return self


class _Keys(SpeculatorsKeys):
    speculators_model_type: Literal["eagle3"]
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: Literal[False] = False
    # Read with the layer's keys, as of other projects.
    draft_vocab_size: Any = None
    target_hidden_size: Any = None
    fc_norm: Any = None
    norm_output: Any = None
    norm_before_residual: Any = None


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json with the values `raw` is in speculators' layout."""
    return raw.get(TYPE) is not None


def flattened(file: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json that other projects would write for this head.

    Raises `CheckpointError` for another kind of drafter, for a key that is not known, and for heads that the EAGLE3
    module does not compute.
    """
    keys = _Keys.read(raw, file)
    _Layer.read(raw[DECODER], file, DECODER, "EAGLE3 heads that differ in it cannot be compiled")
    return keys.transformer_layer_config | {key: raw[key] for key in _OUTER if raw.get(key) is not None}


def read_speculators_taps(file: Path, raw: Mapping[str, Any], layers: int) -> Taps:
    """Return the taps that `raw` names for a target of `layers` layers, or default.

    Raises `CheckpointError` unless they are three different layers.
    """
    ids = _Keys.read(raw, file).eagle_aux_hidden_state_layer_ids
    if ids is None:
        return default_taps(layers)
    why = "indices of hidden_states, as speculators writes them"
    return name_taps(file, _TAPS, ids, range(layers), why, left=False, count=TAPS)


def speculators_name(name: str) -> str:
    """Return speculators' name of a tensor that other projects call `name`."""
    return name.replace("midlayer.", "layers.0.")
