"""Taps of an EAGLE3 head: the residual streams of the target that make its features.

A surprise: projects number the same streams in two ways. SpecForge (whose first id is always 1) and AngelSlim name the
layer whose output is read; vLLM, `speculators` and TorchSpec name the layer that the stream enters, which is the index
in transformers' `hidden_states`. Ours is the second. One key is used in both ways, so its first id decides, by the rule
of SGLang's pull request 25454. Acceptance hardly shows a wrong reading.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outrider.compiler.models.eagle3_config import TAPS, Taps
from outrider.plans.errors import CheckpointError

MIN_LAYERS = 7
"""Fewest layers of a target whose three default taps are distinct."""

_BY_FIRST_ID = "eagle_aux_hidden_state_layer_ids"
_BEHIND = "aux_hidden_states_layer_ids"
_SIMILAR = re.compile(r"aux_hidden_states?_layer")


def read_taps(file: Path, raw: dict[str, Any], layers: int) -> Taps:
    """Return the taps that the head's config.json (`raw` of `file`) names for a target of `layers` layers, or default.

    Raises `CheckpointError` where a key does not name three layers, where two keys name different layers, and for an
    unknown key that looks like a key for taps.
    """
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{file}: eagle_config must be a JSON object, found {nested!r}")
    places = (("eagle_config.", nested), ("", raw))
    named = [
        (place + key, keys[key], _read(file, place + key, keys[key], layers))
        for key in (_BY_FIRST_ID, _BEHIND)
        for place, keys in places
        if keys.get(key) is not None
    ]
    for place, keys in places:
        other = next((key for key in keys if _SIMILAR.search(key) and key not in (_BY_FIRST_ID, _BEHIND)), None)
        if other is not None and keys[other] is not None:
            raise CheckpointError(
                f"{file}: {place}{other} is read by no project that is known here; call it {_BY_FIRST_ID} or "
                f"{_BEHIND}, or set aux_layers in the recipe and remove it"
            )
    if named:
        key, ids, taps = named[0]
        for other, others, read in named[1:]:
            if read.layers != taps.layers:
                raise CheckpointError(
                    f"{file}: {key} is {ids!r}, streams {list(taps.layers)}, and {other} is {others!r}, streams "
                    f"{list(read.layers)}; remove the wrong one, or set aux_layers in the recipe"
                )
        return taps
    if layers < MIN_LAYERS:
        raise CheckpointError(
            f"{file}: the target has {layers} layers, but three distinct default taps need {MIN_LAYERS}; "
            "name others in the recipe's aux_layers"
        )
    return default_taps(layers)


def default_taps(layers: int) -> Taps:
    """Return EAGLE3's default taps for a target of `layers` layers."""
    return Taps((2, layers // 2, layers - 3), "EAGLE3's default: config.json names none")


def _read(file: Path, key: str, ids: object, layers: int) -> Taps:
    numbers = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)] if isinstance(ids, list) else []
    always_behind = key.endswith(f".{_BEHIND}") or key == _BEHIND
    behind = always_behind or numbers[:1] == [1]
    most = layers - 1 - behind
    whole = isinstance(ids, list) and len(ids) == len(set(numbers)) == TAPS
    if not whole or not all(0 <= i <= most for i in numbers):
        raise CheckpointError(
            f"{file}: {key} must be {TAPS} different layers from 0 to {most} of the target, found {ids!r}"
        )
    if not behind:
        why = "first id not 1: indices of hidden_states, as vLLM, speculators and TorchSpec write them"
    elif always_behind:
        why = "layers whose output is read, as AngelSlim writes them: one more each"
    else:
        why = "first id 1: layers whose output is read, as SpecForge writes them: one more each"
    low, middle, high = (i + behind for i in numbers)
    return Taps((low, middle, high), f"{key} {ids}, {why}")
