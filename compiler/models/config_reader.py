"""A checkpoint's JSON files, and the base of the models that their objects are read into."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from outrider.plans.errors import CheckpointError

# Largest accepted sizes, a few times those of any published model, so that a typo does not start an endless build.
Layers = Annotated[int, Field(gt=0, le=2**10)]
Heads = Annotated[int, Field(gt=0, le=2**12)]
HeadSize = Annotated[int, Field(gt=0, le=2**13)]
Width = Annotated[int, Field(gt=0, le=2**18)]
InnerWidth = Annotated[int, Field(gt=0, le=2**20)]
Vocabulary = Annotated[int, Field(gt=0, le=2**24)]
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
"""A multiplier or a cap, within limits far from any in use."""
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]
"""What RMS norms add to the mean of squares, in float32."""
RopeTheta = Annotated[float, Field(ge=1.001, le=1e12)]
"""A base of rotary frequencies: they must fall from one dimension to the next, and stay finite in float32."""
CLAUSES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_attributes_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be text (quote it if it looks like a number)",
    "too_short": "must have at least {min_length} entry",
    "none_required": "must be absent",
    "tuple_type": "must be a list",
}
"""Pydantic's error types as the clause after the key; the fields are those of the error's context."""
_CORRECT = "correct it"
STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Keys(BaseModel):
    """Keys of a JSON object, each of its own type. A null is an absent key, but for those that are `nullable`; those
    `ignored` change nothing."""

    model_config = ConfigDict(**STRICT, frozen=True)
    nullable: ClassVar[Set[str]] = frozenset()
    ignored: ClassVar[Set[str]] = frozenset()
    _file: Path = PrivateAttr(Path())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return {
            key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
            for key, value in raw.items()
            if (value is not None or key in cls.nullable) and key not in cls.ignored
        }

    @classmethod
    def read(cls, raw: Any, file: Path, within: str = "", advice: str = _CORRECT) -> Self:
        """Read `raw`, the object of `file`, or the one `within` it under that key."""
        try:
            keys = cls.model_validate(raw)
        except ValidationError as error:
            place = f"{file}: {within}." if within else f"{file}: "
            raise CheckpointError(place + first_fault(error, advice)) from None
        keys._file = file
        return keys

    @property
    def file(self) -> Path:
        """The file that `read` read."""
        return self._file

    def wrong(self, sentence: str) -> CheckpointError:
        """Return the error of a key that `sentence` begins with."""
        return CheckpointError(f"{self._file}: {sentence}")


def first_fault(error: ValidationError, advice: str = _CORRECT) -> str:
    """Return the first of Pydantic's errors as a sentence that begins with the key. A validator of a whole object
    raises `ValueError` with such a sentence."""
    fault = error.errors()[0]
    key, found = ".".join(map(str, fault["loc"])) or "it", f"{fault['input']!r:.60}"
    if fault["type"] == "value_error":
        return f"{key}.{fault['ctx']['error']}".removeprefix("it.")
    if fault["type"] == "missing":
        return f"{key} is missing; add it" + ("" if advice == _CORRECT else f", or {advice}")
    if fault["type"] == "extra_forbidden":
        return (
            f"{key} is {found}, a key that is not known here and could change what the drafter computes; remove the "
            "key if it does not"
        )
    clause = CLAUSES.get(fault["type"])
    wanted = fault["msg"] if clause is None else clause.format_map(fault.get("ctx", {}))
    return f"{key} {wanted}, found {found}; {advice}"


def read_json(path: Path, missing: str = "a checkpoint folder needs config.json and *.safetensors") -> dict[str, Any]:
    """Read the JSON object in the file; `missing` is the advice where there is none."""
    try:
        if path.exists() and not path.is_file():  # a pipe, or a device: reading it may never end
            raise OSError("it is no file")
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; {missing}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold one JSON object")
    return raw
