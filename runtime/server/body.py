"""What all bodies of requests have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator


class FirstFault(FailFast):
    """Ends a list's check at its first fault: a body may have a hundred thousand. Hashed by Python, in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


FIRST_FAULT = FirstFault()


class Body(BaseModel):
    """A JSON object with exactly the declared types, and no undeclared keys.

    A key that is null is one that was left out, as clients write those that they do not use. `UNREAD` are keys that
    clients send and that change no answer, such as what OpenAI's own client adds to the messages that it has read.
    """

    UNREAD: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_read(cls, given: object) -> object:
        """Leave what is read, and of keys that are not known one: one is enough to be refused. Half a character in it,
        which Pydantic does not take, becomes its escape."""
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        known = {
            key: value
            for key, value in given.items()
            if key in fields and (value is not None or fields[key].is_required())
        }
        unknown = (key for key, value in given.items() if not (value is None or key in fields or key in cls.UNREAD))
        if (key := next(unknown, None)) is None:
            return known
        return known | {key.encode("utf-8", "backslashreplace").decode("utf-8"): given[key]}
