"""Drafters that run on the host, by kind: their settings, as a recipe and a plan have them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from outrider.plans.buffers import Name, Strict

NAME = "what requests call the drafter: small letters, digits, and -_. after the first"
LEAST_MEMORY = 1024  # tokens: a few texts with their leads


class HostDrafter(Strict):
    """Settings of a drafter on the host, as a recipe and a plan have them; `runtime/drafters/KIND.py` makes it.

    Where it foresees fewer than `least` tokens, the drafter named `otherwise` has the round, if there is one.
    """

    name: Name = Field(description=NAME)
    kind: str
    max_draft: int = Field(32, ge=1, le=64, description="most tokens proposed in a step")
    otherwise: str | None = Field(
        None, description="the model, eagle3 or block drafter that drafts where fewer than `least` tokens are foreseen"
    )
    least: int = Field(1, ge=1, le=64, description="foreseen tokens from which on `otherwise` is not asked")

    @model_validator(mode="after")
    def _least_can_be_foreseen(self) -> Self:
        if self.least > self.max_draft:
            context = {"least": self.least, "most": self.max_draft, "at": ("least",)}
            raise PydanticCustomError("least", "is {least}, more than max_draft {most}; lower it", context)
        return self


class NgramDrafter(HostDrafter):
    """A drafter that looks up the last tokens in the sequence itself, and with `memory` in earlier outputs too."""

    kind: Literal["ngram"] = Field(description="the kind of drafter")
    max_context: int = Field(64, ge=1, le=64, description="tokens of the longest suffix that is looked up")
    min_context: int = Field(1, ge=1, description="tokens of the shortest suffix that is looked up")
    min_confidence: float = Field(
        0.25, ge=0, le=1, description="tokens are proposed where the chance that they are accepted is at least this"
    )
    filler_top_k: int = Field(
        3, ge=0, le=8, description="how many of the target's likeliest tokens are learned from too (NASD); 0 is off"
    )
    memory: int = Field(
        0,
        ge=0,
        le=2**24,  # 2.5 GiB
        description="tokens of earlier outputs that are kept at most to draft from, at up to 160 bytes each; 0 is off. "
        "Who shares a runtime shares them, and requests with `remember: false` leave none",
    )

    @field_validator("memory")
    @classmethod
    def _holds_a_text(cls, value: int) -> int:
        if 0 < value < LEAST_MEMORY:
            context = {"value": value, "least": LEAST_MEMORY}
            raise PydanticCustomError("memory", "is {value}; raise it to at least {least} tokens, or set 0", context)
        return value

    @field_validator("min_context")
    @classmethod
    def _not_above_max(cls, value: int, info: ValidationInfo) -> int:
        longest = info.data.get("max_context", value)
        if value > longest:
            context = {"value": value, "longest": longest}
            raise PydanticCustomError("context", "is {value}, more than max_context {longest}; lower it", context)
        return value


HostDrafterKind = NgramDrafter
"""Every kind of drafter on the host: a new one joins with `|`."""
