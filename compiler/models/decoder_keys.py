"""Keys of a decoder's `config.json`, and of a drafter's layers, each of its type; `families` says what stands for those
that are absent.

A rotation is read in both spellings: `rope_parameters` (transformers 5), for all layers or by `layer_types`, and
`rope_theta`, `rope_scaling`, `rope_local_base_freq`, `partial_rotary_factor` before.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from outrider.compiler.models import config_reader as reader
from outrider.compiler.models.config_reader import Keys
from outrider.compiler.models.families import FACTOR_KEYS, FAMILIES, Family
from outrider.compiler.models.rope import RopeScaling
from outrider.plans.errors import CheckpointError

TRAINED = "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_THETA = 10000.0
"""Base of the rotary frequencies where neither a key nor the family gives one."""
_Share = Annotated[float, Field(gt=0, le=1)]


class RopeObject(Keys, extra="allow"):
    """A `rope_parameters` or `rope_scaling`; its other keys are the scaling's, or objects by kind of layer."""

    rope_theta: reader.RopeTheta | None = None
    partial_rotary_factor: _Share | None = None
    original_max_position_embeddings: Any = None
    mrope_section: Any = None  # of positions in images; the three axes of a text are one
    mrope_interleaved: Any = None


_Rope = Annotated[RopeObject | None, BeforeValidator(lambda value: None if value == {} else value)]


class RopeKeys(Keys):
    """The keys of a rotation. Two places that say the same thing must agree."""

    rope_theta: reader.RopeTheta | None = None
    rope_parameters: _Rope = None
    rope_scaling: _Rope = None
    partial_rotary_factor: _Share | None = None
    max_position_embeddings: Any = None
    original_max_position_embeddings: Any = None

    @property
    def objects(self) -> dict[str, RopeObject]:
        """The objects that are given, by key."""
        named = {"rope_parameters": self.rope_parameters, "rope_scaling": self.rope_scaling}
        return {key: given for key, given in named.items() if given is not None}

    def agreed(self, name: str) -> tuple[str, Any] | None:
        """Return the first place of `name` and the value there, which every place of it has; None where no place has
        one."""
        places: dict[str, RopeKeys | RopeObject] = {f"{key}.{name}": each for key, each in self.objects.items()}
        given = {place: getattr(each, name) for place, each in (places | {name: self}).items()}
        found = [(place, value) for place, value in given.items() if value is not None]
        other = next((each for each in found if each[1] != found[0][1]), None)
        if other is not None:
            raise self.wrong(f"{found[0][0]} is {found[0][1]!r} and {other[0]} is {other[1]!r}; remove the wrong one")
        return found[0] if found else None

    def rope(self, replacement: RopeScaling | None, default: float = ROPE_THETA) -> tuple[float, RopeScaling]:
        """Return base and scaling; `default` is the base where no key gives one.

        Two given spellings must agree: transformers takes `rope_scaling` alone and forgets the rest of
        `rope_parameters`. The checkpoint's scaling is not read where `replacement` replaces it, which is the way out of
        an unsupported scaling.
        """
        theta = (self.agreed("rope_theta") or ("", default))[1]
        if replacement is not None:
            return theta, replacement
        found = {key: self._scaling_of(key, given) for key, given in self.objects.items()}
        spoken = self.rope_theta is not None or (self.rope_scaling is not None and self.rope_scaling.rope_theta)
        if len(set(found.values())) > 1 or (len(found) > 1 and not spoken and theta != default):
            raise self.wrong(
                "rope_parameters and rope_scaling contradict each other, and transformers reads rope_scaling "
                "alone, without the rope_theta of rope_parameters; keep one of them: move all keys into "
                "rope_parameters, or leave rope_scaling out and set the recipe's rope_scaling"
            )
        return theta, next(iter(found.values()), RopeScaling())

    def _scaling_of(self, key: str, given: RopeObject) -> RopeScaling:
        """Return the scaling that the object under `key` describes."""
        values = dict(given.model_extra or {})
        trained = self.model_copy(update={other: None for other in self.objects if other != key}).agreed(TRAINED)
        if trained is None and values.get("rope_type", values.get("type")) in ("longrope", "su"):
            raise self.wrong(f"{key} is of longrope, and {TRAINED} is missing; add it")
        most = self.max_position_embeddings if "max_position_embeddings" in self.model_fields_set else None
        original = values[TRAINED] = most if trained is None else trained[1]
        asks = values.get("long_factor") and not values.get("factor")
        if asks and isinstance(original, int) and isinstance(most, int):
            values["factor"] = most / max(original, 1)
        try:
            return RopeScaling.from_huggingface(values)
        except ValueError as error:
            raise self.wrong(str(error)) from None


class PlainKeys(RopeKeys):
    """Keys of a drafter's layers, which see all tokens and rotate whole heads."""

    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None


class DecoderKeys(RopeKeys):
    """Keys of a decoder of any family."""

    nullable: ClassVar[Set[str]] = frozenset(
        {"sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
    )

    model_type: str
    vocab_size: reader.Vocabulary
    hidden_size: reader.Width
    intermediate_size: reader.InnerWidth
    num_hidden_layers: reader.Layers
    num_attention_heads: reader.Heads
    num_key_value_heads: reader.Heads | None = None
    head_dim: reader.HeadSize | None = None
    rms_norm_eps: reader.Epsilon
    max_position_embeddings: reader.Count = 2048
    attention_bias: bool
    mlp_bias: bool = False
    tie_word_embeddings: bool
    hidden_act: Any = None
    hidden_activation: Any = None
    use_bidirectional_attention: Literal[False] = False
    is_causal: Literal[True] = True

    layer_types: list[Literal["full_attention", "sliding_attention", "conv", "linear_attention"]] | None = None
    sliding_window: int | None
    use_sliding_window: bool = False
    sliding_window_pattern: reader.Count | None = None
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    no_rope_layers: list[Literal[0, 1]] | None = None
    no_rope_layer_interval: reader.Count | None = None
    rope_local_base_freq: reader.RopeTheta | None = None

    # Of LFM2: its convolutions, the layers that attend in the spelling before `layer_types`, and how wide its MLP is.
    conv_L_cache: Annotated[int, Field(ge=2, le=16)] = 3  # noqa: N815
    conv_bias: bool = False
    full_attn_idxs: list[Annotated[int, Field(ge=0)]] | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: reader.Factor = 1.0
    block_multiple_of: reader.InnerWidth = 256

    # Of gated delta nets.
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=16)] = 4
    linear_key_head_dim: reader.HeadSize = 128
    linear_value_head_dim: reader.HeadSize = 128
    linear_num_key_heads: reader.Heads = 16
    linear_num_value_heads: reader.Heads = 32
    full_attention_interval: reader.Count | None = None

    query_pre_attn_scalar: reader.Factor | None = None
    attn_logit_softcapping: reader.Factor | None = None
    final_logit_softcapping: reader.Factor | None = None
    embedding_multiplier: reader.Factor = 1.0
    attention_multiplier: reader.Factor = 1.0
    residual_multiplier: reader.Factor = 1.0
    logits_scaling: reader.Factor = 1.0

    # Nothing computes with these, or another file may overrule them: a wrong value shows a damaged file.
    torch_dtype: str | None = None
    dtype: str | None = None
    architectures: list[str] | None = None
    eos_token_id: Annotated[list[int], BeforeValidator(lambda value: value if isinstance(value, list) else [value])] = (
        Field(default_factory=list)
    )

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]


def read_decoder_keys(raw: Mapping[str, Any], file: Path) -> DecoderKeys:
    """Read a `config.json` with the values `raw`."""
    raw = text_of(raw)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = _INSIDE if name in ("gemma3", "mistral3") else ""
        raise CheckpointError(
            f"{file}: model_type {name!r} is not supported{hint}; known families: {', '.join(FAMILIES)} "
            "(`outrider families` says what each is)"
        )
    family = FAMILIES[name]
    unread = {
        "no_rope_layers": family.unrotated_every is None,
        "no_rope_layer_interval": family.unrotated_every is None,
        "rope_local_base_freq": not family.own_local_rope,
        "mlp_bias": family.mlp_bias is not None,
        "sliding_window_pattern": family.pattern_key is None,
        "max_window_layers": family.slides != "switched",
    }
    raw = {family.renamed.get(key, key): raw[key] for key in sorted(raw, key=lambda key: key in family.renamed)}
    given = {key: value for key, value in raw.items() if value is not None or key in DecoderKeys.nullable}
    keys = DecoderKeys.read(family.absent | {key: given[key] for key in given if not unread.get(key)}, file)
    activation = raw.get(family.activation_key)
    if activation is not None and activation not in family.activation_names:
        known = family.activation_names[0]
        raise keys.wrong(f"{family.activation_key} is {activation!r}; only {known!r} can be compiled")
    for key in sorted(FACTOR_KEYS - {key for key, _ in family.factors.values()}):
        if raw.get(key) not in (None, 1, 1.0):
            raise keys.wrong(
                f"{key} is {raw[key]!r}, which {family.title} models do not have, and transformers ignores it; "
                "remove it, or give the model_type of a family that has it"
            )
    return keys


def text_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `text_config` of a model that holds one of the families; of others `raw` itself."""
    inside = {family.nested_in: name for name, family in FAMILIES.items() if family.nested_in is not None}
    name, text = raw.get("model_type"), raw.get("text_config")
    if not isinstance(name, str) or name not in inside or not isinstance(text, Mapping):
        return raw
    whole = {key: raw[key] for key in ("tie_word_embeddings",) if raw.get(key) is not None}
    return {**text, **whole, "model_type": inside[name]}


_INSIDE = " (its text model is: save that by itself; compiler/models/README.md says how)"
"""Advice for models that hold one of the families."""
