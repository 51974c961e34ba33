"""config.json of block drafters: three layouts that describe one head, each read strictly.

A surprise: projects number the same streams of the target in two ways. z-lab, JetSpec and DeepSpec name the layer that
a stream leaves (-1: the embedding), speculators the layer that it enters, which is the index in transformers'
`hidden_states`. Ours is the second. A second one: z-lab, JetSpec and speculators' `dflash` predict at each mask the
token of its own place; DeepSpec and speculators' `dspark` predict the token after it, and so draft one more.

A key that is not known could change what a head computes, so it is refused; keys that cannot are listed by name
(`known_keys`). How weights are packed is read elsewhere (`models/quantization`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast, get_args

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
from outrider.compiler.models.block_config import BlockConfig, Confidence, Markov, MarkovKind
from outrider.compiler.models.config import DecoderConfig, config_from
from outrider.compiler.models.config_layers import refuse_unsupported
from outrider.compiler.models.config_reader import Reader
from outrider.compiler.models.eagle3_config import Taps
from outrider.compiler.models.quantization import SETTINGS
from outrider.plans.errors import CheckpointError


class Layout(Enum):
    """Who wrote a checkpoint, as messages name it."""

    ZLAB = "a DFlash or JetSpec head in z-lab's layout"
    DEEPSPEC = "a DSpark or DFlash head in DeepSpec's layout"
    SPECULATORS = "a DFlash or DSpark head in speculators' layout"


DEEPSPEC_CLASS, _ZLAB_CLASS, _NESTED = "Qwen3DSparkModel", "DFlashDraftModel", "dflash_config"
_MOST_RANK = 2**16

_MARKOV = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
# Every projection's bias is a tensor or absent.
_HARMLESS = HARMLESS | WINDOW | {"mlp_bias"}
_KNOWN = {
    Layout.ZLAB: GEOMETRY | {"block_size", "num_target_layers", _NESTED},
    Layout.DEEPSPEC: GEOMETRY | _MARKOV | {"block_size", "num_target_layers", "target_layer_ids", "mask_token_id"},
    Layout.SPECULATORS: _MARKOV | {
        TYPE, DECODER, ABOUT, "draft_vocab_size", "block_size", "target_hidden_size", "mask_token_id",
        "aux_hidden_state_layer_ids", "sample_from_anchor",
    },
}  # fmt: skip
_KNOWN_NESTED = {"target_layer_ids", "mask_token_id", "block_size", "causal_head", "target_hidden_size"}
_DECODERS = ("qwen3", "llama")


class _Drafting(NamedTuple):
    """What a layout says beside the geometry of the layers."""

    block_size: int
    sample_from_anchor: bool
    causal: bool
    mask_token_id: int
    markov: Markov | None
    confidence: Confidence
    draft_vocab_size: int
    taps: Taps


def layout_of(file: Path, raw: Mapping[str, Any]) -> Layout:
    """Return the layout of the config.json `file` with the values `raw`.

    Raises `CheckpointError` for a layout, a class or a kind of drafter that is not read.
    """
    named = raw.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else named
    if raw.get(TYPE) is not None:
        if raw[TYPE] not in ("dflash", "dspark"):
            raise CheckpointError(
                f"{file}: {TYPE} is {raw[TYPE]!r}; block drafters of speculators are 'dflash' and 'dspark'"
            )
        return Layout.SPECULATORS
    if architecture == DEEPSPEC_CLASS:
        return Layout.DEEPSPEC
    if raw.get(_NESTED) is not None and architecture in (_ZLAB_CLASS, None):
        return Layout.ZLAB
    raise CheckpointError(
        f"{file}: is no block drafter that is read here: architectures is {raw.get('architectures')!r}, {_NESTED} is "
        f"{'absent' if raw.get(_NESTED) is None else 'present'}, {TYPE} is absent; expected {TYPE} (speculators), "
        f"architectures [{DEEPSPEC_CLASS!r}] (DeepSpec), or [{_ZLAB_CLASS!r}] with {_NESTED} (z-lab, JetSpec)"
    )


def read_layout(
    file: Path, raw: Mapping[str, Any], layout: Layout, target: DecoderConfig, own_embedding: bool
) -> BlockConfig:
    """Read the geometry of a head for `target` from the config.json `file` with the values `raw`.

    `own_embedding`: the checkpoint has an embedding; in DeepSpec's layout, an embedding and output weights. Raises
    `CheckpointError` naming file, key and expectation.
    """
    refuse_unknown(file, "", raw, _KNOWN[layout] | _HARMLESS | set(SETTINGS))
    decoder, bias = _read_decoder(file, raw, layout, target)
    read = {Layout.ZLAB: _zlab, Layout.DEEPSPEC: _deepspec, Layout.SPECULATORS: _speculators}[layout]
    drafting = read(file, raw, decoder, target)
    least = 1 if drafting.sample_from_anchor else 2
    if drafting.block_size < least:
        raise CheckpointError(f"{file}: block_size is {drafting.block_size}; such a block drafts nothing below {least}")
    return BlockConfig(
        hidden_size=decoder.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_layers=decoder.num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        rms_norm_eps=decoder.rms_norm_eps,
        rope_theta=decoder.rope_theta,
        rope_scaling=decoder.rope_scaling,
        attention_bias=bias,
        vocab_size=decoder.vocab_size,
        own_embedding=own_embedding,
        own_lm_head=layout is Layout.SPECULATORS or (layout is Layout.DEEPSPEC and own_embedding),
        **drafting._asdict(),
    )


def _read_decoder(
    file: Path, raw: Mapping[str, Any], layout: Layout, target: DecoderConfig
) -> tuple[DecoderConfig, bool]:
    """Return the decoder whose layers the head's are, and whether attention has biases; check it against `target`."""
    kinds: tuple[str, ...] = ("qwen3",)
    if layout is Layout.SPECULATORS:
        raw, kinds = object_of(file, raw, DECODER), _DECODERS
        refuse_unknown(file, f"{DECODER}.", raw, GEOMETRY | _HARMLESS)
    if raw.get("model_type") not in kinds:
        raise CheckpointError(
            f"{file}: model_type is {raw.get('model_type')!r}; the layers of {layout.value} are those of "
            f"{' or '.join(kinds)}"
        )
    # The layers are Qwen3's whatever the model type, which only says what an absent key means.
    refuse_unsupported(raw, file)
    alike = {key: value for key, value in raw.items() if key != "layer_types"}
    decoder = config_from(alike, file, None, file, None)
    for key, own, wanted in (
        ("hidden_size", decoder.hidden_size, target.hidden_size),
        ("vocab_size", decoder.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise CheckpointError(
                f"{file}: {key} is {own}, but the target's is {wanted}; give a drafter that was trained for this target"
            )
    return decoder, Reader(raw, file).boolean("attention_bias", False)


def _zlab(file: Path, raw: Mapping[str, Any], decoder: DecoderConfig, target: DecoderConfig) -> _Drafting:
    nested = object_of(file, raw, _NESTED)
    place = f"{_NESTED}."
    refuse_unknown(file, place, nested, _KNOWN_NESTED)
    _check_num_target_layers(file, raw, target)
    _check_target_hidden_size(file, place, nested, decoder)
    above, inside = raw.get("block_size"), nested.get("block_size")
    if above is not None and inside is not None and above != inside:
        raise CheckpointError(
            f"{file}: block_size is {above!r} and {place}block_size is {inside!r}; remove the wrong one"
        )
    ids = nested.get("target_layer_ids")
    if ids is None:
        ids, why = _zlab_default(target.num_layers, decoder.num_layers), "z-lab's default: config.json names none"
    else:
        why = "layers whose output is read, as z-lab writes them: one more each"
    return _Drafting(
        block_size=Reader(raw if inside is None else nested, file).integer("block_size"),
        sample_from_anchor=False,
        causal=Reader(nested, file).boolean("causal_head", False),
        mask_token_id=_mask(file, place, nested, decoder.vocab_size),
        markov=None,
        confidence=Confidence.NONE,
        draft_vocab_size=decoder.vocab_size,
        taps=_taps(file, f"{place}target_layer_ids", ids, target.num_layers, 1, why),
    )


def _deepspec(file: Path, raw: Mapping[str, Any], decoder: DecoderConfig, target: DecoderConfig) -> _Drafting:
    _check_num_target_layers(file, raw, target)
    markov, confidence = _heads(file, raw, {})
    why = "layers whose output is read, as DeepSpec writes them: one more each"
    return _Drafting(
        block_size=Reader(raw, file).integer("block_size"),
        sample_from_anchor=True,
        causal=False,
        mask_token_id=_mask(file, "", raw, decoder.vocab_size),
        markov=markov,
        confidence=confidence,
        draft_vocab_size=decoder.vocab_size,
        taps=_taps(file, "target_layer_ids", raw.get("target_layer_ids"), target.num_layers, 1, why),
    )


def _speculators(file: Path, raw: Mapping[str, Any], decoder: DecoderConfig, target: DecoderConfig) -> _Drafting:
    get = Reader(raw, file)
    dspark = raw[TYPE] == "dspark"
    _check_target_hidden_size(file, "", raw, decoder)
    markov, confidence = None, Confidence.NONE
    if dspark:
        # Values that speculators gives to absent keys.
        absent = {"markov_rank": 256, "markov_head_type": "vanilla"}
        absent |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True)
        markov, confidence = _heads(file, raw, absent)
    else:
        refuse_unknown(file, "", raw, raw.keys() - _MARKOV)
    draft_vocab = get.integer("draft_vocab_size")
    if draft_vocab > decoder.vocab_size:
        raise CheckpointError(f"{file}: draft_vocab_size {draft_vocab} is greater than vocab_size {decoder.vocab_size}")
    key = "aux_hidden_state_layer_ids"
    why = "indices of hidden_states, as speculators writes them"
    drafting = _Drafting(
        block_size=get.integer("block_size"),
        sample_from_anchor=get.boolean("sample_from_anchor", dspark),
        causal=False,
        mask_token_id=_mask(file, "", raw, decoder.vocab_size),
        markov=markov,
        confidence=confidence,
        draft_vocab_size=draft_vocab,
        taps=_taps(file, key, raw.get(key), target.num_layers, 0, why),
    )
    if markov is not None and markov.kind == "rnn" and not drafting.sample_from_anchor:
        raise CheckpointError(
            f"{file}: markov_head_type is 'rnn' and sample_from_anchor is off; the state of such a head also passes "
            "through the tip, which cannot be compiled"
        )
    _check_proposals(file, raw, drafting)
    return drafting


def _check_proposals(file: Path, raw: Mapping[str, Any], drafting: _Drafting) -> None:
    """Raise `CheckpointError` where `speculators_config` tells of another drafter than the keys beside it."""
    most = drafting.block_size - (not drafting.sample_from_anchor)
    methods = read_about(file, raw).get("proposal_methods")
    for index, method in enumerate(methods if isinstance(methods, list) else []):
        count = method.get("speculative_tokens") if isinstance(method, dict) else None
        if isinstance(count, int) and count > most:
            raise CheckpointError(
                f"{file}: {ABOUT}.proposal_methods[{index}].speculative_tokens is {count}, but a block of "
                f"{drafting.block_size} drafts {most}, as sample_from_anchor is "
                f"{'on' if drafting.sample_from_anchor else 'off'}; correct the wrong one"
            )


def _heads(file: Path, raw: Mapping[str, Any], absent: Mapping[str, Any]) -> tuple[Markov | None, Confidence]:
    """Return the Markov bias and the confidence; `absent` has the values of keys that may be absent."""
    values = {**absent, **{key: raw[key] for key in _MARKOV if raw.get(key) is not None}}

    def boolean(key: str) -> bool:
        if key not in values:
            raise CheckpointError(f"{file}: {key} must be true or false, and is absent; give a complete config.json")
        return Reader(values, file).boolean(key, False)

    rank = values.get("markov_rank")
    if not _is_whole(rank) or not 0 <= rank <= _MOST_RANK:
        raise CheckpointError(f"{file}: markov_rank must be a number from 0 to {_MOST_RANK}, found {rank!r}")
    markov = None
    if rank:
        kind = values.get("markov_head_type")
        if kind not in get_args(MarkovKind):
            raise CheckpointError(
                f"{file}: markov_head_type is {kind!r}; known kinds: {', '.join(get_args(MarkovKind))}"
            )
        markov = Markov(cast(MarkovKind, kind), rank)
    if not boolean("enable_confidence_head"):
        return markov, Confidence.NONE
    if not boolean("confidence_head_with_markov"):
        return markov, Confidence.HIDDEN
    if markov is None:
        raise CheckpointError(f"{file}: confidence_head_with_markov is on, but markov_rank is 0; correct the wrong one")
    return markov, Confidence.HIDDEN_AND_MARKOV


def _taps(file: Path, key: str, ids: object, layers: int, behind: int, why: str) -> Taps:
    """Return the taps of the layer numbers `ids`; `behind` is 1 where a number names the layer that a stream leaves."""
    numbers = [i for i in ids if _is_whole(i)] if isinstance(ids, list) else []
    least, most = -behind, layers - 1 - behind
    whole = isinstance(ids, list) and len(ids) == len(set(numbers)) > 0
    if not whole or not all(least <= i <= most for i in numbers):
        raise CheckpointError(
            f"{file}: {key} must be different layers of the target from {least} to {most}, found {ids!r}; the stream "
            "behind the last layer, which transformers norms, cannot be read"
        )
    return Taps(tuple(i + behind for i in numbers), f"{key} {ids}, {why}")


def _zlab_default(layers: int, draft_layers: int) -> list[int]:
    """Return z-lab's layers where config.json names none: as many as the draft has, spread over the target."""
    if draft_layers == 1:
        return [layers // 2]
    span = layers - 4
    return [round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers)]


def _mask(file: Path, place: str, raw: Mapping[str, Any], vocab: int) -> int:
    token = raw.get("mask_token_id")
    if not _is_whole(token) or not 0 <= token < vocab:
        raise CheckpointError(f"{file}: {place}mask_token_id must be a token from 0 to {vocab - 1}, found {token!r}")
    return token


def _check_num_target_layers(file: Path, raw: Mapping[str, Any], target: DecoderConfig) -> None:
    count = raw.get("num_target_layers")
    if count not in (None, target.num_layers):
        raise CheckpointError(
            f"{file}: num_target_layers is {count!r}, but the target has {target.num_layers} layers; "
            "give a drafter that was trained for this target"
        )


def _check_target_hidden_size(file: Path, place: str, raw: Mapping[str, Any], decoder: DecoderConfig) -> None:
    size = raw.get("target_hidden_size")
    if size not in (None, decoder.hidden_size):
        raise CheckpointError(
            f"{file}: {place}target_hidden_size is {size!r} and hidden_size is {decoder.hidden_size}; heads of another "
            "width than their target's cannot be compiled"
        )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
