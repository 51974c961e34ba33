"""Mappings of a recipe that others hold: the base class of all, rotary scaling, quantised weights, partial KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plans.buffers import LARGEST_SIZE
from outrider.plans.partial_kv import PartialBudget, PartialKv, PartialMode, Reduce


def _printable(written: str) -> str:
    if not written.isprintable():
        raise PydanticCustomError("path", "holds a character that cannot be printed; correct the path")
    return written


WrittenPath = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"}), AfterValidator(_printable)]
"""A path as the recipe writes it: absolute, under `~`, or relative to the recipe."""


class Section(BaseModel):
    """A mapping of the recipe: no unknown keys, no conversions between types, no changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


def check_distinct(entries: Sequence[str]) -> None:
    """Raise `PydanticCustomError` where a list has no entry, or has one twice."""
    if not entries:
        raise PydanticCustomError("entries", "must have at least 1 entry, found []")
    for index, entry in enumerate(entries):
        if entry in entries[:index]:
            raise PydanticCustomError(
                "entries", "repeats '{entry}'; keep one of them", {"entry": entry, "at": (index,)}
            )


def _shown(name: str) -> JsonDict:
    """Return the schema's default for a key that may be left out."""
    return {"default": getattr(RopeScaling, name)}


class RopeScalingSection(Section):
    """Rotary scaling in Hugging Face's names."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = Field(description="the kind of scaling")
    factor: float | None = Field(None, description="how many times longer the context becomes")
    original_max_position_embeddings: int | None = Field(
        None, description="tokens of the context the model was trained on; llama3 and yarn need it"
    )
    low_freq_factor: float | None = Field(
        None,
        description="llama3: slower frequencies are divided by the factor",
        json_schema_extra=_shown("low_freq_factor"),
    )
    high_freq_factor: float | None = Field(
        None, description="llama3: faster frequencies are kept", json_schema_extra=_shown("high_freq_factor")
    )
    beta_fast: float | None = Field(
        None, description="yarn: rotations from which a dimension is kept", json_schema_extra=_shown("beta_fast")
    )
    beta_slow: float | None = Field(
        None,
        description="yarn: rotations below which a dimension is interpolated",
        json_schema_extra=_shown("beta_slow"),
    )
    attention_factor: float | None = Field(None, description="yarn: scales the tables; by default from the factor")
    mscale: float | None = Field(None, description="yarn: with mscale_all_dim, replaces the default attention factor")
    mscale_all_dim: float | None = Field(None, description="yarn: see mscale")
    truncate: bool | None = Field(
        None, description="yarn: round the bounds of the ramp to whole dimensions", json_schema_extra=_shown("truncate")
    )

    @model_validator(mode="after")
    def _consistent(self) -> RopeScalingSection:
        try:
            self.scaling()
        except ValueError as error:
            raise PydanticCustomError("rope_scaling", "is wrong: {reason}", {"reason": str(error)}) from None
        return self

    def scaling(self) -> RopeScaling:
        return RopeScaling.from_huggingface(self.model_dump(exclude_none=True))


def positions_served(config: DecoderConfig, *, replaced: bool) -> int:
    """Return the positions that a model is made for; `replaced` says that the recipe gave its rotary scaling.

    A checkpoint's own linear scaling is already counted in its maximum.
    """
    scaling, own = config.rope_scaling, config.max_positions
    if scaling.kind in ("llama3", "yarn"):
        return max(own, int(scaling.original_max_position_embeddings * scaling.factor))
    if scaling.kind == "linear" and replaced:
        return max(own, int(own * scaling.factor))
    return own


_BITS = {"int4": 4, "int8": 8, "float": None}


class WeightsSection(Section):
    """Quantised weights: integers in blocks of 32, with a scale each. On the CPU a token's logits do not depend on what
    is computed in the same pass, so that drafts, branches and other requests change no token.

    Weights that a checkpoint stores as such integers keep them.
    """

    type: Literal["int4", "int8"] = Field(description="type of the weights of all layers")
    lm_head: Literal["int4", "int8", "float"] = Field(
        "int8", description="type of the head and of the embedding; float: they stay as the checkpoint has them"
    )
    method: Literal["rtn", "awq"] = Field(
        "rtn",
        description="rtn: each weight goes to its nearest step; awq: on text, scales of the inputs "
        "are searched, and what rounding takes from one input's weight those of others make up for, so that products "
        "move little",
    )
    calibration: WrittenPath | None = Field(
        None,
        description='JSONL file of {"prompt": ...}, or its .gz, that awq searches on, relative to the recipe: some '
        "tens of KB of text like what the model will read",
    )

    requantize: bool = Field(
        False,
        description="round again what a checkpoint stores as integers of more bits, or in groups that no blocks of 32 "
        "hold, such as Q6_K of GGUF; false refuses it",
    )

    @model_validator(mode="after")
    def _awq_has_text(self) -> WeightsSection:
        if self.method == "awq" and self.calibration is None:
            raise PydanticCustomError(
                "method", "is awq, which searches on text; name it with calibration: FILE.jsonl", {"at": ("method",)}
            )
        if self.method == "rtn" and self.calibration is not None:
            raise PydanticCustomError(
                "calibration", "is read by method: awq alone; set that, or leave it out", {"at": ("calibration",)}
            )
        return self

    @property
    def form(self) -> WeightForm:
        bits = _BITS[self.type]
        assert bits is not None
        return WeightForm(bits, _BITS[self.lm_head], self.requantize)


class PartialKvSection(Section):
    """A partial KV cache of a few blocks of a long context, in which most steps are verified."""

    enabled: bool = Field(False, description="whether the plan has one")
    block_size: int = Field(
        16, ge=1, le=256, description="tokens of a block: keys are summarised and fetched by blocks"
    )
    n_sink_blocks: int = Field(2, ge=0, le=LARGEST_SIZE, description="blocks of the very beginning, always kept")
    n_retrieval_blocks: int = Field(
        256,
        ge=1,
        le=LARGEST_SIZE,
        description="most blocks fetched from the middle, for each key head; layers with a sliding window keep the "
        "last ones instead, which must hold their window together with n_window_blocks",
    )
    n_window_blocks: int = Field(8, ge=1, le=LARGEST_SIZE, description="last blocks, always kept")
    n_spec_tokens_buf: int = Field(
        128,
        ge=2,
        le=255,
        description="tokens after the window: those of steps since the KV cache was filled, and drafts; one pass over "
        "the full KV cache takes them all, with logits",
    )
    partial_threshold: int = Field(
        4096, ge=0, le=LARGEST_SIZE, description="tokens of context up to which the full KV cache is used"
    )
    full_refresh_interval: int = Field(
        32, ge=1, le=LARGEST_SIZE, description="most steps between two passes over the full KV cache"
    )
    reduction: Reduce = Field("max", description="how scores of a block by several queries become one: max, mean, last")
    most_queries: int = Field(
        8, ge=1, le=256, description="accepted tokens, the last ones, whose queries choose blocks"
    )
    n_draft_window_tokens: int = Field(
        1024,
        ge=1,
        le=LARGEST_SIZE,
        description="tokens of a drafter's window, in plans of one branch: its KV cache keeps the sink and these",
    )
    budget: PartialBudget | None = Field(
        None,
        description="blocks fetched for requests that do not say how many: a number, auto, or all that there is "
        "room for",
    )
    mode: PartialMode = Field(
        "lossless",
        description="of requests that do not say theirs: lossless, where tokens are confirmed over the full KV cache "
        "before they count; lossy, where they are not; off",
    )

    def settings(self) -> PartialKv | None:
        """Return the settings that a plan keeps; None where partial KV is not enabled."""
        return PartialKv(**self.model_dump(exclude={"enabled", "n_draft_window_tokens"})) if self.enabled else None

    def drafters_keep(self, context: int, branches: int) -> tuple[int, int]:
        """Return how many tokens of the beginning and of the end drafters' KV caches keep; 0 and 0 (all tokens) where
        partial KV is off, where the caches have room for the context, and in plans of several branches."""
        sink, window = self.n_sink_blocks * self.block_size, self.n_draft_window_tokens
        return (sink, window) if self.enabled and branches == 1 and sink + 2 * window < context else (0, 0)
