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
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from outrider.compiler.eagle3_taps import name_taps
from outrider.compiler.known_keys import DECODER, GEOMETRY, HARMLESS, TYPE, WINDOW, SpeculatorsKeys, StrictKeys
from outrider.compiler.models.block_config import BlockConfig, Confidence, Markov, MarkovKind
from outrider.compiler.models.config import DecoderConfig, config_from
from outrider.compiler.models.config_reader import Keys, Vocabulary
from outrider.compiler.models.decoder_keys import PlainKeys
from outrider.compiler.models.quantization import SETTINGS
from outrider.plans.errors import CheckpointError


class Layout(Enum):
    """Who wrote a checkpoint, as messages name it."""

    ZLAB = "a DFlash or JetSpec head in z-lab's layout"
    DEEPSPEC = "a DSpark or DFlash head in DeepSpec's layout"
    SPECULATORS = "a DFlash or DSpark head in speculators' layout"


DEEPSPEC_CLASS, _ZLAB_CLASS, _NESTED = "Qwen3DSparkModel", "DFlashDraftModel", "dflash_config"
_OF_LAYERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling",
)  # fmt: skip
_BlockSize = Annotated[int, Field(gt=0, le=2**10)]
_Token = Annotated[int, Field(ge=0)]
_Rank = Annotated[int, Field(ge=0, le=2**16)]


class _HeadKeys(StrictKeys):
    """Keys of a head beside those of its layers."""

    ignored = HARMLESS | WINDOW | set(SETTINGS) | {"mlp_bias"}  # every projection's bias is a tensor or absent


class _LayerKeys(_HeadKeys):
    """Keys of speculators' layers alone, which are read elsewhere: all others are refused."""

    ignored = GEOMETRY | _HeadKeys.ignored - set(SETTINGS)


class _Dflash(Keys, extra="forbid"):
    block_size: _BlockSize | None = None
    mask_token_id: _Token
    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    causal_head: bool = False


class _Zlab(_HeadKeys):
    ignored = GEOMETRY | _HeadKeys.ignored

    block_size: _BlockSize | None = None
    num_target_layers: int | None = None
    dflash_config: _Dflash

    @model_validator(mode="after")
    def _check_block(self) -> Self:
        size, inside = self.block_size, self.dflash_config.block_size
        if size is None and inside is None:
            raise ValueError("block_size is missing; add it")
        if None not in (size, inside) and size != inside:
            raise ValueError(f"block_size is {size} and {_NESTED}.block_size is {inside}; remove the wrong one")
        return self

    def drafting(self, decoder: DecoderConfig, target: DecoderConfig) -> dict[str, Any]:
        nested = self.dflash_config
        _check_size(self, f"{_NESTED}.target_hidden_size", nested.target_hidden_size, decoder)
        ids, why = nested.target_layer_ids, "layers whose output is read, as z-lab writes them: one more each"
        known = range(-1, target.num_layers - 1)  # -1 is the embedding
        if ids is None:  # one for each of the draft's layers, spread over the target
            span, each = target.num_layers - 4, decoder.num_layers
            ids = [round(1 + i * span / (each - 1)) for i in range(each)] if each > 1 else [target.num_layers // 2]
            why = "z-lab's default: config.json names none"
        return {
            "block_size": self.block_size or nested.block_size,
            "causal": nested.causal_head,
            "mask_token_id": nested.mask_token_id,
            "taps": name_taps(self.file, f"{_NESTED}.target_layer_ids", ids, known, why, left=True),
        }


class _MarkovKeys(_HeadKeys):
    markov_rank: _Rank
    markov_head_type: MarkovKind | None = None
    enable_confidence_head: bool
    confidence_head_with_markov: bool | None = None

    def heads(self) -> tuple[Markov | None, Confidence]:
        kind, joined = self.markov_head_type, self.confidence_head_with_markov
        if self.markov_rank and kind is None:
            raise self.wrong("markov_head_type is missing, and markov_rank is not 0; add it")
        markov = Markov(kind, self.markov_rank) if kind is not None and self.markov_rank else None
        if not self.enable_confidence_head:
            return markov, Confidence.NONE
        if joined is None:
            raise self.wrong("confidence_head_with_markov is missing; give a complete config.json")
        if joined and markov is None:
            raise self.wrong("confidence_head_with_markov is on, but markov_rank is 0; correct the wrong one")
        return markov, Confidence.HIDDEN_AND_MARKOV if joined else Confidence.HIDDEN


class _Deepspec(_MarkovKeys):
    ignored = GEOMETRY | _HeadKeys.ignored

    block_size: _BlockSize
    num_target_layers: int | None = None
    mask_token_id: _Token
    target_layer_ids: list[int]

    def drafting(self, decoder: DecoderConfig, target: DecoderConfig) -> dict[str, Any]:
        markov, confidence = self.heads()
        why = "layers whose output is read, as DeepSpec writes them: one more each"
        known = range(-1, target.num_layers - 1)
        return {
            "block_size": self.block_size,
            "sample_from_anchor": True,
            "mask_token_id": self.mask_token_id,
            "markov": markov,
            "confidence": confidence,
            "taps": name_taps(self.file, "target_layer_ids", self.target_layer_ids, known, why, left=True),
        }


class _Speculators(SpeculatorsKeys):
    ignored = _HeadKeys.ignored

    draft_vocab_size: Vocabulary
    block_size: _BlockSize
    target_hidden_size: int | None = None
    mask_token_id: _Token
    aux_hidden_state_layer_ids: list[int]
    sample_from_anchor: bool = False

    def heads(self) -> tuple[Markov | None, Confidence]:
        return None, Confidence.NONE

    def drafting(self, decoder: DecoderConfig, target: DecoderConfig) -> dict[str, Any]:
        _check_size(self, "target_hidden_size", self.target_hidden_size, decoder)
        markov, confidence = self.heads()
        if self.draft_vocab_size > decoder.vocab_size:
            raise self.wrong(
                f"draft_vocab_size {self.draft_vocab_size} is greater than vocab_size {decoder.vocab_size}; correct it"
            )
        if markov is not None and markov.kind == "rnn" and not self.sample_from_anchor:
            raise self.wrong(
                "markov_head_type is 'rnn' and sample_from_anchor is off; the state of such a head also passes "
                "through the tip, which cannot be compiled"
            )
        most = self.block_size - (not self.sample_from_anchor)
        for index, method in enumerate(self.speculators_config.proposal_methods):
            count = method.get("speculative_tokens")
            if isinstance(count, int) and count > most:
                raise self.wrong(
                    f"speculators_config.proposal_methods[{index}].speculative_tokens is {count}, but a block of "
                    f"{self.block_size} drafts {most}, as sample_from_anchor is "
                    f"{'on' if self.sample_from_anchor else 'off'}; correct the wrong one"
                )
        key, why = "aux_hidden_state_layer_ids", "indices of hidden_states, as speculators writes them"
        known = range(target.num_layers)
        return {
            **self.model_dump(include={"block_size", "sample_from_anchor", "mask_token_id", "draft_vocab_size"}),
            "markov": markov,
            "confidence": confidence,
            "taps": name_taps(self.file, key, self.aux_hidden_state_layer_ids, known, why, left=False),
        }


class _Dspark(_MarkovKeys, _Speculators):
    markov_rank: _Rank = 256
    markov_head_type: MarkovKind = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True


def layout_of(file: Path, raw: Mapping[str, Any]) -> Layout:
    """Return the layout of the config.json `file` with the values `raw`."""
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
    keys: _Zlab | _Deepspec | _Speculators
    if layout is Layout.ZLAB:
        keys = _Zlab.read(raw, file)
    elif layout is Layout.DEEPSPEC:
        keys = _Deepspec.read(raw, file)
    else:
        keys = (_Dspark if raw[TYPE] == "dspark" else _Speculators).read(raw, file)
    decoder = _read_decoder(keys, raw, layout, target)
    absent = {"sample_from_anchor": False, "causal": False, "markov": None, "confidence": Confidence.NONE}
    drafting = absent | {"draft_vocab_size": decoder.vocab_size} | keys.drafting(decoder, target)
    mask, least = drafting["mask_token_id"], 1 if drafting["sample_from_anchor"] else 2
    if mask >= decoder.vocab_size:
        raise keys.wrong(f"mask_token_id must be a token from 0 to {decoder.vocab_size - 1}, found {mask}; correct it")
    if drafting["block_size"] < least:
        raise keys.wrong(f"block_size is {drafting['block_size']}; such a block drafts nothing below {least}")
    return BlockConfig(
        **{name: getattr(decoder, name) for name in _OF_LAYERS},
        target_hidden_size=target.hidden_size,
        attention_bias=decoder.output_bias,
        own_embedding=own_embedding,
        own_lm_head=layout is Layout.SPECULATORS or (layout is Layout.DEEPSPEC and own_embedding),
        **drafting,
    )


def _read_decoder(keys: Keys, raw: Mapping[str, Any], layout: Layout, target: DecoderConfig) -> DecoderConfig:
    """Return the decoder whose layers the head's are; check it against `target`."""
    file, kinds = keys.file, ["qwen3"]
    if layout is Layout.SPECULATORS:
        raw, kinds = raw[DECODER], ["qwen3", "llama"]
        _LayerKeys.read(raw, file, DECODER)
    if raw.get("model_type") not in kinds:
        raise keys.wrong(
            f"model_type is {raw.get('model_type')!r}; the layers of {layout.value} are those of {' or '.join(kinds)}"
        )
    # The layers are Qwen3's with any model type, which only says what an absent key means.
    PlainKeys.read(raw, file)
    alike = {key: value for key, value in raw.items() if key != "layer_types"}
    decoder = config_from(alike, file, None, file, None)
    for key, own, wanted in (
        ("hidden_size", decoder.hidden_size, target.hidden_size),
        ("vocab_size", decoder.vocab_size, target.vocab_size),
        ("num_target_layers", getattr(keys, "num_target_layers", None), target.num_layers),
    ):
        if own not in (None, wanted):
            raise keys.wrong(
                f"{key} is {own}, but the target's is {wanted}; give a drafter that was trained for this target"
            )
    return decoder


def _check_size(keys: Keys, key: str, size: int | None, decoder: DecoderConfig) -> None:
    if size not in (None, decoder.hidden_size):
        raise keys.wrong(
            f"{key} is {size} and hidden_size is {decoder.hidden_size}; heads of another width than their target's "
            "cannot be compiled"
        )
