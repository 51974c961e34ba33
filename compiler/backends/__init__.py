"""The backends that a recipe may list, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, TypeAdapter, create_model

from outrider.compiler.backends.base import Backend
from outrider.plans.backends import BACKENDS, DEFAULT
from outrider.plans.errors import RecipeError


def make_backend_class(kind: str, module: str) -> type[Backend]:
    """Return the class of the backend `kind`: that of its `module`, or where it has none `Backend`, with this kind."""
    base: type[Backend] = import_module(module).BACKEND if find_spec(module) else Backend
    literal: Any = Literal[kind]
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, kind=(literal, base.model_fields["kind"]))


BACKEND_CLASSES = {kind: make_backend_class(kind, f"{__name__}.{each.module}") for kind, each in BACKENDS.items()}

if TYPE_CHECKING:
    BackendEntry = Backend
else:
    _Discriminated = Annotated[Union[tuple(BACKEND_CLASSES.values())], Field(discriminator="kind")]  # noqa: UP007
    BackendEntry = Annotated[
        _Discriminated,
        BeforeValidator(
            lambda written: {"kind": written} if isinstance(written, str) else written,
            json_schema_input_type=_Discriminated | Literal[tuple(BACKENDS)],
        ),
    ]
    """A backend's section, or its kind alone."""

_ENTRY: TypeAdapter[Backend] = TypeAdapter(BackendEntry)
DEFAULT_BACKENDS: tuple[Backend, ...] = (_ENTRY.validate_python(DEFAULT),)


def choose_backends(listed: Sequence[Backend], kinds: Sequence[str]) -> tuple[Backend, ...]:
    """Return the sections of `kinds`, as `listed`, else with defaults. Raises `RecipeError` for an unknown backend."""
    for kind in kinds:
        if kind not in BACKENDS:
            raise RecipeError(f"there is no backend {kind!r}; choose from {', '.join(BACKENDS)}")
    own = {section.kind: section for section in listed}
    return tuple(own.get(kind) or _ENTRY.validate_python(kind) for kind in dict.fromkeys(kinds))
