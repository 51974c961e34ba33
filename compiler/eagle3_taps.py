"""Taps of an EAGLE3 head: which residual streams of the target make its features.

What surprises: projects spell the same layers in two ways. Behind a layer, as SpecForge (whose first id is always 1)
and AngelSlim; or as the index of the stream that enters a layer, which is that of transformers' `hidden_states`, as
vLLM, `speculators` and TorchSpec. Ours are of the second kind. One key has both, so that its first id decides, by the
rule of SGLang's pull request 25454. Accepted tokens hardly tell the two apart.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from compiler.models.eagle3_config import TAPS, Taps
from plans.errors import CheckpointError

MIN_LAYERS = 7
"""Layers a target needs for the three default taps to be distinct."""

_BY_FIRST_ID = "eagle_aux_hidden_state_layer_ids"
_BEHIND = "aux_hidden_states_layer_ids"
_SIMILAR = re.compile(r"aux_hidden_states?_layer")


def read_taps(file: Path, raw: dict[str, Any], layers: int) -> Taps:
    """The taps that the head's config.json, `raw` of `file`, names for a target of so many layers, or the default.

    Raises `CheckpointError` where a key names no three layers, two keys name different ones, or a key that seems to
    name some is spelled as none of those that are known.
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
    """Default layers that EAGLE3 reads of a target of so many."""
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
