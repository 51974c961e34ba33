"""What a `config.json` says of single layers: which slide, which convolve, and how each rotates queries and keys."""

from __future__ import annotations

from typing import Any

from outrider.compiler.models.decoder_keys import CONV, FULL, SLIDING, TRAINED, DecoderKeys, RopeKeys, RopeObject
from outrider.compiler.models.mixers import ShortConvConfig
from outrider.compiler.models.rope import Rope, RopeScaling

_SWITCHED = ("switched", "all_switched")


def read_windows(keys: DecoderKeys) -> tuple[int | None, ...]:
    """Return each layer's window; empty where no layer has one."""
    family = keys.family
    # Other families than those that are switched do not read the switch, in transformers either.
    switched = keys.use_sliding_window if family.slides in _SWITCHED else family.slides != "never"
    window = keys.sliding_window if switched else None
    if window is not None and not 0 < window < 2**31:
        raise keys.wrong(f"sliding_window must be from 1 to {2**31 - 1}, found {window}; correct it")
    kinds = _layer_types(keys, window)
    if SLIDING not in kinds:
        return ()
    if family.slides == "never":
        raise keys.wrong(f"layer_types: layers of {family.title} models have no window, and this file gives them one")
    if window is None:
        raise keys.wrong(
            f"layer_types has {SLIDING!r}, and there is no window: set sliding_window"
            + (" and use_sliding_window" if family.slides in _SWITCHED else "")
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _layer_types(keys: DecoderKeys, window: int | None) -> list[str]:
    """Return each layer's kind of attention, in transformers' words."""
    standing, given, layers = _usual_types(keys, window), keys.layer_types, keys.num_hidden_layers
    if given is None:
        return standing
    if len(given) != layers:
        raise keys.wrong(f"layer_types must list the kind of each of the {layers} layers, found {given!r:.80}")
    if keys.family.fixed_layer_types and given != standing:
        raise keys.wrong(
            f"layer_types differs from what transformers computes for {keys.family.name} models, which read "
            "sliding_window alone; remove it, or give the model_type of a family that reads it"
        )
    if CONV in given and not keys.family.convolves:
        raise keys.wrong(f"layer_types has {CONV!r}, and layers of {keys.family.title} models have none; correct it")
    return list(given)


def read_convolutions(keys: DecoderKeys) -> dict[str, Any]:
    """Return `conv`, `conv_layers` and `intermediate_size` of `DecoderConfig`, for a family that convolves."""
    if not keys.family.convolves:
        return {"intermediate_size": keys.intermediate_size}
    kinds = _layer_types(keys, None)
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == CONV)
    if len(layers) == len(kinds):
        raise keys.wrong("layer_types: no layer attends, and a plan has a KV cache; give a model with attention layers")
    width = keys.intermediate_size
    if keys.block_auto_adjust_ff_dim:  # as transformers computes it
        width = int(keys.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // keys.block_multiple_of) * keys.block_multiple_of
    conv = ShortConvConfig(keys.conv_L_cache, keys.conv_bias) if layers else None
    return {"conv": conv, "conv_layers": layers, "intermediate_size": width}


def _usual_types(keys: DecoderKeys, window: int | None) -> list[str]:
    """Return the kinds of layers that stand for absent `layer_types`."""
    family, layers = keys.family, range(keys.num_hidden_layers)
    slides = family.slides
    if family.convolves and keys.full_attn_idxs is not None:
        return [FULL if layer in keys.full_attn_idxs else CONV for layer in layers]
    if window is None or slides == "never":
        sliding = frozenset[int]()
    elif isinstance(slides, int):
        every = slides if family.pattern_key is None else keys.sliding_window_pattern or slides
        sliding = frozenset(layer for layer in layers if (layer + 1) % every)
    elif slides in ("all", "all_switched"):
        sliding = frozenset(layers)
    elif family.unrotated_every is not None:  # SmolLM3: layers that rotate see everything
        sliding = read_unrotated(keys)
    else:
        sliding = frozenset(layers[keys.max_window_layers :])
    return [SLIDING if layer in sliding else FULL for layer in layers]


def read_unrotated(keys: DecoderKeys) -> frozenset[int]:
    """Return the layers that rotate nothing."""
    layers = range(keys.num_hidden_layers)
    if keys.family.unrotated_every is None:
        return frozenset()
    given = keys.no_rope_layers  # 1 where a layer rotates, for all its name
    if given is None:
        every = keys.no_rope_layer_interval or keys.family.unrotated_every
        return frozenset(layer for layer in layers if (layer + 1) % every == 0)
    if len(given) < len(layers):
        raise keys.wrong(f"no_rope_layers must list 0 or 1 for each of the {len(layers)} layers, found {given!r:.80}")
    return frozenset(layer for layer in layers if not given[layer])


def read_rotations(
    keys: DecoderKeys, head_dim: int, replacement: RopeScaling | None, context: int | None
) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling`, `local_rope` and `rotary_size` of `DecoderConfig`.

    `replacement` replaces the scaling of layers that see everything. A scaling that depends on the `context` is the one
    for it.
    """
    family, usual = keys.family, dict[str, Any]()
    if family.trained_positions is not None and keys.agreed(TRAINED) is None:
        usual[TRAINED] = family.trained_positions
    if family.rope_scaling is not None and not keys.objects:
        usual["rope_parameters"] = RopeObject.model_validate(family.rope_scaling)
    keys = keys.model_copy(update=usual)
    nested = keys.rope_parameters.model_extra if keys.rope_parameters is not None else None
    by_kind = nested if nested and nested.keys() & {FULL, SLIDING} else None
    if by_kind is not None and not family.own_local_rope:
        raise keys.wrong(f"rope_parameters is by kind of layer, which {family.title} models do not have")
    whole = keys if by_kind is None else _of_kind(keys, by_kind, FULL)
    size = _rotary_size(whole, head_dim)
    theta, scaling = whole.rope(replacement, family.rope_theta)
    local = None
    if family.own_local_rope:
        apart = _of_kind(keys, by_kind or {}, SLIDING).model_copy(
            update={"rope_scaling": None, "rope_theta": keys.rope_local_base_freq}
        )
        local_theta, local_scaling = apart.rope(None, family.local_theta)
        local = Rope(local_theta, _sized(keys, local_scaling, size, context), size)
    return {
        "rope_theta": theta,
        "rope_scaling": _sized(keys, scaling, size, context),
        "local_rope": local,
        "rotary_size": None if size == head_dim else size,
    }


def _of_kind(keys: DecoderKeys, by_kind: dict[str, Any], kind: str) -> DecoderKeys:
    """Return the keys of layers of one kind."""
    read = RopeKeys.read({"rope_parameters": by_kind.get(kind)}, keys.file)
    return keys.model_copy(update={"rope_parameters": read.rope_parameters})


def _rotary_size(keys: DecoderKeys, head_dim: int) -> int:
    """Return how many numbers of a head are rotated."""
    place, factor = keys.agreed("partial_rotary_factor") or ("", 1.0)
    size = int(head_dim * factor)
    if factor != 1 and not keys.family.partial_rotation:
        raise keys.wrong(f"{place} is {factor!r}; {keys.family.title} models rotate whole heads")
    if factor != 1 and (size < 2 or size % 2):
        raise keys.wrong(f"{place} {factor!r} of a head of {head_dim} is {size} numbers; an even number is rotated")
    return size


def _sized(keys: DecoderKeys, scaling: RopeScaling, size: int, context: int | None) -> RopeScaling:
    """Return the scaling for `context`; raise `CheckpointError` where its tables are of another size."""
    for name in ("short_factor", "long_factor"):
        table = getattr(scaling, name)
        if table and len(table) != size // 2:
            raise keys.wrong(f"rope scaling's {name!r} has {len(table)} numbers, and {size // 2} pairs are rotated")
    return scaling if context is None else scaling.for_context(context)
