"""The section of a recipe that says how weights are stored and multiplied."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.recipe_section import Section, WrittenPath

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
