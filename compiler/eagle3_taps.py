"""Taps of an EAGLE3 head: the residual streams of the target that make its features.

A surprise: projects number the same streams in two ways. SpecForge (whose first id is always 1) and AngelSlim name the
layer whose output is read; vLLM, `speculators` and TorchSpec name the layer that the stream enters, which is the index
in transformers' `hidden_states`. Ours is the second. One key is used in both ways, so its first id decides, by the rule
of SGLang's pull request 25454. Acceptance hardly shows a wrong reading.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.compiler.models.config_reader import Keys
from outrider.compiler.models.eagle3_config import TAPS, Taps
from outrider.plans.errors import CheckpointError

MIN_LAYERS = 7
"""Fewest layers of a target whose three default taps are distinct."""

_BY_FIRST_ID = "eagle_aux_hidden_state_layer_ids"
_LEFT = "aux_hidden_states_layer_ids"
_SIMILAR = re.compile(r"aux_hidden_states?_layer")


class _Names(Keys, extra="allow"):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    aux_hidden_states_layer_ids: list[int] | None = None


class _Keys(_Names):
    eagle_config: _Names = _Names()


def read_taps(file: Path, raw: dict[str, Any], layers: int) -> Taps:
    """Return the taps that config.json (`raw` of `file`) names for a target of `layers` layers, or default."""
    keys = _Keys.read(raw, file)
    places: dict[str, _Names] = {"eagle_config.": keys.eagle_config, "": keys}
    similar = (place + key for place, each in places.items() for key in each.model_extra or () if _SIMILAR.search(key))
    if (other := next(similar, None)) is not None:
        raise keys.wrong(
            f"{other} is read by no project that is known here; call it {_BY_FIRST_ID} or {_LEFT}, or set aux_layers "
            "in the recipe and remove it"
        )
    named = [
        _read(file, place, key, ids, layers)
        for key in (_BY_FIRST_ID, _LEFT)
        for place, each in places.items()
        if (ids := getattr(each, key)) is not None
    ]
    differing = next((taps for taps in named if taps.layers != named[0].layers), None)
    if differing is not None:
        one, two = (f"{taps.reason} ({list(taps.layers)})" for taps in (named[0], differing))
        raise keys.wrong(f"{one}; and {two}; remove the wrong one, or set aux_layers in the recipe")
    if named:
        return named[0]
    if layers < MIN_LAYERS:
        raise keys.wrong(
            f"the target has {layers} layers, but three distinct default taps need {MIN_LAYERS}; "
            "name others in the recipe's aux_layers"
        )
    return default_taps(layers)


def default_taps(layers: int) -> Taps:
    """Return EAGLE3's default taps for a target of `layers` layers."""
    return Taps((2, layers // 2, layers - 3), "EAGLE3's default: config.json names none")


def name_taps(
    file: Path, key: str, ids: Sequence[int], known: range, why: str, *, left: bool, count: int | None = None
) -> Taps:
    """Return the taps that `ids`, the numbers of layers under `key`, name; `why` is the reason.

    With `left` a number names the layer that a stream leaves, else the one that it enters.
    """
    if not ids or len(set(ids)) != (count or len(ids)) or len(ids) != len(set(ids)) or not set(ids) <= set(known):
        raise CheckpointError(
            f"{file}: {key} must be {count or ''} different layers of the target from {known[0]} to {known[-1]}, found "
            f"{ids!r}; the stream after the last layer, which transformers norms, cannot be read".replace("  ", " ")
        )
    return Taps(tuple(i + left for i in ids), f"{key} {ids}, {why}")


def _read(file: Path, place: str, key: str, ids: list[int], layers: int) -> Taps:
    left = key == _LEFT or ids[:1] == [1]
    if not left:
        why = "first id not 1: indices of hidden_states, as vLLM, speculators and TorchSpec write them"
    elif key == _LEFT:
        why = "layers whose output is read, as AngelSlim writes them: one more each"
    else:
        why = "first id 1: layers whose output is read, as SpecForge writes them: one more each"
    return name_taps(file, place + key, ids, range(layers - left), why, left=left, count=TAPS)
