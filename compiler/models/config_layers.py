"""What a `config.json` says of single layers: which slide, and how each rotates queries and keys.

Keys are read in both spellings: `rope_parameters` (transformers 5), for all layers or by `layer_types`, and
`rope_theta`, `rope_scaling`, `rope_local_base_freq`, `partial_rotary_factor` before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.compiler.models.config_reader import ROPE_THETA, Reader
from outrider.compiler.models.families import Family
from outrider.compiler.models.rope import Rope, RopeScaling
from outrider.plans.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_TRAINED = "original_max_position_embeddings"
_SWITCHED = ("switched", "all_switched")


def read_windows(
    raw: Mapping[str, Any], path: Path, get: Reader, family: Family, layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window; empty where no layer has one. Raises `CheckpointError`."""
    # Other families than those that are switched do not read the switch, in transformers either.
    switched = get.boolean("use_sliding_window", False) if family.slides in _SWITCHED else family.slides != "never"
    window = None
    if raw.get("sliding_window", family.window) is not None and switched:
        window = get.integer("sliding_window", family.window)
    kinds = _layer_types(raw, path, get, family, window, layers)
    slides = [layer for layer, kind in enumerate(kinds) if kind == _SLIDING]
    if not slides:
        return ()
    if family.slides == "never":
        raise CheckpointError(f"{path}: layers of {family.title} models have no window, and this file gives them one")
    if window is None:
        raise CheckpointError(
            f"{path}: layer_types has {_SLIDING!r}, and there is no window: set sliding_window"
            + (" and use_sliding_window" if family.slides in _SWITCHED else "")
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _layer_types(
    raw: Mapping[str, Any], path: Path, get: Reader, family: Family, window: int | None, layers: int
) -> list[str]:
    """Return each layer's kind of attention, in transformers' words."""
    slides = family.slides
    if isinstance(slides, int):
        every = slides if family.pattern_key is None else get.integer(family.pattern_key, slides)
        standing = [_SLIDING if window is not None and (layer + 1) % every else _FULL for layer in range(layers)]
    elif window is None or slides == "never":
        standing = [_FULL] * layers
    elif slides in ("all", "all_switched"):
        standing = [_SLIDING] * layers
    elif family.unrotated_every is not None:  # SmolLM3: layers that rotate see everything
        without = read_unrotated(raw, path, family, layers)
        standing = [_SLIDING if layer in without else _FULL for layer in range(layers)]
    else:
        first = get.whole("max_window_layers", 28)
        standing = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    given = raw.get("layer_types")
    if given is None:
        return standing
    if not isinstance(given, list) or len(given) != layers:
        raise CheckpointError(
            f"{path}: layer_types must list the kind of each of the {layers} layers, found {given!r:.80}"
        )
    other = next((each for each in given if each not in (_FULL, _SLIDING)), None)
    if other is not None:
        raise CheckpointError(f"{path}: layer_types has {other!r}; only {_FULL!r} and {_SLIDING!r} can be compiled")
    if family.fixed_layer_types and given != standing:
        raise CheckpointError(
            f"{path}: layer_types differs from what transformers computes for {family.name} models, which read "
            "sliding_window alone; remove it, or give the model_type of a family that reads it"
        )
    return list(given)


def read_unrotated(raw: Mapping[str, Any], path: Path, family: Family, layers: int) -> frozenset[int]:
    """Return the layers that rotate nothing. Raises `CheckpointError`."""
    if family.unrotated_every is None:
        return frozenset()
    given = raw.get("no_rope_layers")  # 1 where a layer rotates, for all its name
    if given is None:
        every = Reader(raw, path).integer("no_rope_layer_interval", family.unrotated_every)
        given = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(each not in (0, 1) for each in given):
        raise CheckpointError(
            f"{path}: no_rope_layers must list 0 or 1 for each of the {layers} layers, found {given!r:.80}"
        )
    return frozenset(layer for layer in range(layers) if not given[layer])


def read_rotations(
    raw: Mapping[str, Any],
    path: Path,
    family: Family,
    head_dim: int,
    replacement: RopeScaling | None,
    context: int | None,
) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling`, `local_rope` and `rotary_size` of `DecoderConfig`.

    `replacement` replaces the scaling of layers that see everything. A scaling that depends on the `context` is the one
    for it. Raises `CheckpointError`.
    """
    if family.trained_positions is not None and raw.get(_TRAINED) is None and not _trained_inside(raw):
        raw = {**raw, _TRAINED: family.trained_positions}
    if family.rope_scaling is not None and not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = {**raw, "rope_parameters": {**family.rope_scaling}}
    nested = raw.get("rope_parameters")
    by_kind = nested if isinstance(nested, dict) and set(nested) & {_FULL, _SLIDING} else None
    if by_kind is not None and not family.own_local_rope:
        raise CheckpointError(f"{path}: rope_parameters is by kind of layer, which {family.title} models do not have")
    whole = raw if by_kind is None else {**raw, "rope_parameters": by_kind.get(_FULL)}
    size = _rotary_size(whole, path, family, head_dim)
    theta, scaling = read_rope(whole, path, Reader(whole, path), replacement, family.rope_theta)
    scaling = _sized(scaling, path, size, context)
    local = None
    if family.own_local_rope:
        apart = {**raw, "rope_parameters": None if by_kind is None else by_kind.get(_SLIDING), "rope_scaling": None}
        apart["rope_theta"] = raw.get("rope_local_base_freq")
        local_theta, local_scaling = read_rope(apart, path, Reader(apart, path), None, family.local_theta)
        local = Rope(local_theta, _sized(local_scaling, path, size, context), size)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope": local,
        "rotary_size": None if size == head_dim else size,
    }


def _trained_inside(raw: Mapping[str, Any]) -> bool:
    places = (raw.get(key) for key in ("rope_parameters", "rope_scaling"))
    return any(isinstance(place, dict) and place.get(_TRAINED) is not None for place in places)


def _rotary_size(raw: Mapping[str, Any], path: Path, family: Family, head_dim: int) -> int:
    """Return how many numbers of a head are rotated."""
    places: dict[str, Any] = {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), dict):
            places[f"{key}.partial_rotary_factor"] = raw[key].get("partial_rotary_factor")
    given = {place: value for place, value in places.items() if value is not None}
    if not given:
        return head_dim
    place, factor = next(iter(given.items()))
    wrong = next(((other, value) for other, value in given.items() if value != factor), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: {place} is {factor!r} and {wrong[0]} is {wrong[1]!r}; remove the wrong one")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor <= 1:
        raise CheckpointError(f"{path}: {place} must be a number above 0 and up to 1, found {factor!r}")
    size = int(head_dim * factor)
    if factor != 1 and not family.partial_rotation:
        raise CheckpointError(f"{path}: {place} is {factor!r}; {family.title} models rotate whole heads")
    if size < 2 or size % 2:
        raise CheckpointError(
            f"{path}: {place} {factor!r} of a head of {head_dim} is {size} numbers; an even number is rotated"
        )
    return size


def _sized(scaling: RopeScaling, path: Path, size: int, context: int | None) -> RopeScaling:
    """Return the scaling for `context`; raise `CheckpointError` where its tables are of another size."""
    for name in ("short_factor", "long_factor"):
        table = getattr(scaling, name)
        if table and len(table) != size // 2:
            raise CheckpointError(
                f"{path}: rope scaling's {name!r} has {len(table)} numbers, and {size // 2} pairs are rotated"
            )
    return scaling if context is None else scaling.for_context(context)


def refuse_unsupported(raw: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` for a setting of a drafter's layers that no module here computes."""
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act is {raw['hidden_act']!r}; only 'silu' can be compiled")
    if raw.get("use_sliding_window"):
        raise CheckpointError(f"{path}: use_sliding_window is on; sliding-window attention cannot be compiled")
    layers = raw.get("layer_types")
    other = next((each for each in layers if each != "full_attention"), None) if isinstance(layers, list) else None
    if other is not None:
        raise CheckpointError(f"{path}: layer_types has {other!r}; only 'full_attention' can be compiled")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise CheckpointError(
            f"{path}: partial_rotary_factor is {raw['partial_rotary_factor']!r}; only whole heads can be rotated"
        )


def read_rope(
    raw: Mapping[str, Any], path: Path, get: Reader, replacement: RopeScaling | None, default: float = ROPE_THETA
) -> tuple[float, RopeScaling]:
    """Read base and scaling in either spelling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

    `default` is the base where no key gives one. Two given spellings must agree: transformers takes `rope_scaling`
    alone and forgets the rest of `rope_parameters`. The checkpoint's scaling is not read where `replacement` replaces
    it, which is the way out of an unsupported scaling. Raises `CheckpointError`.
    """
    given: dict[str, dict[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{path}: {key} must be a JSON object, found {value!r}")
        if value:
            given[key] = value
    theta = _rope_theta(given, path, get, default)
    if replacement is not None:
        return theta, replacement
    found = {key: _scaling(raw, path, key, values) for key, values in given.items()}
    forgotten = (
        len(given) > 1 and given["rope_scaling"].get("rope_theta", raw.get("rope_theta")) is None and theta != default
    )
    if forgotten or len(set(found.values())) > 1:
        raise CheckpointError(
            f"{path}: rope_parameters and rope_scaling contradict each other, and transformers reads rope_scaling "
            "alone, without the rope_theta of rope_parameters; keep one of them: move all keys into rope_parameters, "
            "or leave rope_scaling out and set the recipe's rope_scaling"
        )
    return theta, next(iter(found.values()), RopeScaling())


def _rope_theta(given: Mapping[str, dict[str, Any]], path: Path, get: Reader, default: float) -> float:
    """Return the one base that all given places agree on; `default` where no place gives a base."""
    named = {f"{key}.rope_theta": Reader(v, path) for key, v in given.items() if "rope_theta" in v}
    bases = {place: read.rope_theta(default) for place, read in named.items()}
    bases["rope_theta"] = get.rope_theta(next(iter(bases.values()), default))
    (first, base), *others = bases.items()
    for place, other in others:
        if other != base:
            raise CheckpointError(f"{path}: {first} is {base:g} and {place} is {other:g}; remove the wrong one")
    return base


def _scaling(raw: Mapping[str, Any], path: Path, key: str, parameters: dict[str, Any]) -> RopeScaling:
    """Return the scaling that `parameters`, the object under `key`, describe."""
    values = {name: value for name, value in parameters.items() if name != "rope_theta"}
    values.pop("partial_rotary_factor", None)  # `_rotary_size` reads it
    name, kind = _TRAINED, values.get("rope_type", values.get("type"))
    outside, inside = raw.get(name), values.get(name)
    if outside is None and inside is None and kind in ("longrope", "su"):
        raise CheckpointError(f"{path}: {key} is of longrope, and {name} is missing; add it")
    if outside is not None and inside is not None and outside != inside:
        raise CheckpointError(f"{path}: {name} is {outside!r} and {key}.{name} is {inside!r}; remove the wrong one")
    if inside is None:
        values[name] = raw.get("max_position_embeddings") if outside is None else outside
    original, most = values.get(name), raw.get("max_position_embeddings")
    if values.get("long_factor") and not values.get("factor") and isinstance(original, int) and isinstance(most, int):
        values["factor"] = most / max(original, 1)
    try:
        return RopeScaling.from_huggingface(values)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
