"""What all bodies of requests have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, FailFast, model_validator


class FirstFault(FailFast):
    """Ends a list's check at its first fault: a body may have a hundred thousand. Hashed by Python, in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


FIRST_FAULT = FirstFault()


class Body(BaseModel):
    """An object whose values have the very types they are to have, and which has no other keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_key(cls, given: object) -> object:
        """Leave one key of those that are not known: one is enough to be refused. Half a character in it, which
        Pydantic does not take, becomes its escape."""
        if not isinstance(given, dict) or given.keys() <= cls.model_fields.keys():
            return given
        unknown = next(key for key in given if key not in cls.model_fields)
        known = {key: value for key, value in given.items() if key in cls.model_fields}
        return known | {unknown.encode("utf-8", "backslashreplace").decode("utf-8"): given[unknown]}
