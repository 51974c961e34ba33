"""Rotary scaling in a recipe, and the positions that a model serves with it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.recipe_section import Section


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
