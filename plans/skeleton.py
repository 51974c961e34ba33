"""`skeleton.json` of a plan: how answers are outlined. No part of the contract that programs run by: only
skeleton-of-thought reads it, and a plan without the file has the defaults.
"""

from __future__ import annotations

from string import Formatter
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from outrider.plans.buffers import LARGEST_SIZE, Strict
from outrider.plans.errors import PlanError
from outrider.plans.plan import Plan

SKELETON_FILE = "skeleton.json"


class Skeleton(Strict):
    """How an answer is outlined and its points written as branches.

    `branch` is what a point's branch begins with, after system and question: `{outline}`, and `{point}`, its line,
    which stands after the points that it waits for and what its tool has found.
    """

    system: str | None = None
    tools: tuple[str, ...] = ()
    most_points: Annotated[int, Field(ge=1, le=16)] = 16
    direct: bool = True
    outline_tokens: Annotated[int, Field(ge=1, le=LARGEST_SIZE)] = 384
    branch: str = "{outline}\n{point}\n"

    @field_validator("branch")
    @classmethod
    def _can_be_filled(cls, value: str) -> str:
        if not is_branch_template(value):
            raise ValueError("is no template of a branch")
        return value


def is_branch_template(text: str) -> bool:
    """Whether `text` has the field `{point}`, and none but that and `{outline}`, both as they are."""
    try:
        fields = [(name, form, change) for _, name, form, change in Formatter().parse(text) if name is not None]
    except ValueError:
        return False
    return ("point", "", None) in fields and set(fields) <= {("point", "", None), ("outline", "", None)}


def read_skeleton(plan: Plan) -> Skeleton:
    """The plan's settings, or the defaults where it has no such file. Raises `PlanError` for a wrong file."""
    if all(entry.path != SKELETON_FILE for entry in plan.manifest.files):
        return Skeleton()
    path = plan.file(SKELETON_FILE)
    try:
        return Skeleton.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PlanError(f"{path}: {key}: {first['msg']}; build the plan again") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error}); build the plan again") from None
