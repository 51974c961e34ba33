"""A recipe's YAML as plain data with the place of each value, and pydantic's errors as sentences.

YAML is read as a node tree, so that every value has a line, duplicate keys are errors, and nothing in the file can
construct a Python object.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from outrider.compiler.models.config_reader import CLAUSES
from outrider.plans.errors import RecipeError
from outrider.plans.text_file import read_text_file

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Location = tuple[str | int, ...]
"""The place of a value: keys and list indices from the top."""

_KEPT = 60  # characters of a value that a message shows


class RecipeSource:
    """The recipe file as data: `values` (None until read) and the place of each value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: object = None
        self._places: dict[Location, str] = {}

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> RecipeSource:
        """Read `path` and apply `overrides`, each `dotted.key=value` with a value in YAML (`drafters=[]`).

        Raises `RecipeError` for a file or an override that cannot be read, and for duplicate keys.
        """
        source = cls(path)
        try:
            text = read_text_file(path)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
        except OSError as error:
            raise RecipeError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from None
        source.values = source._parse(text, (), None)
        if not isinstance(source.values, dict):
            found = "is empty" if source.values is None else f"holds {_shown(source.values)}"
            raise RecipeError(f"{path}: {found}, expected a mapping that starts with 'name:'")
        for override in overrides:
            source._override(override)
        return source

    def error(self, location: Location, clause: str) -> RecipeError:
        """Return the error `clause` about the key at `location`, with the key's place."""
        place = self._places.get(self._nearest(location), str(self.path))
        return RecipeError(f"{place}: {_dotted(location)} {clause}")

    def errors(self, invalid: ValidationError, model: type[BaseModel]) -> RecipeError:
        """Return pydantic's errors for `values` as a `model`, one sentence per line, in the order of the file."""
        # A default that follows from another key has no error of its own where that key has one.
        errors = [error for error in invalid.errors() if error["type"] != "default_factory_not_called"]
        wanted: dict[Location, dict[str, None]] = {}  # what the types of a union want of one value
        for error in errors:
            if template := CLAUSES.get(error["type"]):
                context = error.get("ctx", {})
                location, _ = _resolve((*error["loc"], *context.get("at", ())), self.values, model)
                wanted.setdefault(location, {})[template.format_map(context)] = None
        found = dict.fromkeys(self._sentence(error, model, wanted) for error in errors)
        return RecipeError("\n".join(sentence for _, sentence in sorted(found, key=lambda pair: pair[0])))

    def _beside(self, location: Location) -> Collection[str]:
        """Return the keys of the mapping that holds a key of the file; none for an override, which may mean any key."""
        if not self._places.get(location, "").startswith(f"{self.path}:"):
            return ()
        mapping: Any = self.values
        for part in location[:-1]:
            mapping = mapping[part]
        return list(mapping)

    def _nearest(self, location: Location) -> Location:
        """Return the location itself, or the nearest enclosing location with a place; empty where there is none."""
        while location and location not in self._places:
            location = location[:-1]
        return location

    def _sentence(
        self, error: ErrorDetails, model: type[BaseModel], wanted: Mapping[Location, Iterable[str]]
    ) -> tuple[int, str]:
        context = error.get("ctx", {})
        # Our own validators name the part of the value that is at fault by "at".
        location, section = _resolve((*error["loc"], *context.get("at", ())), self.values, model)
        if error["type"].startswith("union_tag_"):  # the error names the whole value, but one key is at fault
            location = (*location, str(context["discriminator"]).strip("'"))
        key = location[-1] if location else ""
        if error["type"] == "union_tag_invalid":
            clause = f"must be one of {context['expected_tags']}, found {context['tag']!r}"
        elif error["type"] == "extra_forbidden":
            clause = _unknown(str(key), list(section.model_fields), self._beside(location))
        elif error["type"] in ("missing", "union_tag_not_found"):
            clause = "is missing; add it"
        else:
            clause = error["msg"]
            if error["type"] in CLAUSES:
                clause = (
                    f"{' or '.join(wanted[location]).replace(' or must be ', ' or ')}, found {_shown(error['input'])}"
                )
        field = section.model_fields.get(str(key))
        if field is not None and field.description and error["type"] != "extra_forbidden":
            clause += f" ({field.description})"
        nearest = self._nearest(location)
        order = list(self._places).index(nearest) if nearest else len(self._places)
        return order, str(self.error(location, clause))

    def _override(self, override: str) -> None:
        place = f"override {override!r}"
        dotted, equals, text = override.partition("=")
        if not equals or not dotted:
            raise RecipeError(f"{place}: must have the form key=value, such as capacity.context=8192")
        location: Location = tuple(
            int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", dotted) if part
        )
        parent: Any = self.values
        for size, part in enumerate(location[:-1], start=1):
            if isinstance(parent, dict) and isinstance(part, str):
                self._places.setdefault(location[:size], place)
                parent = parent.setdefault(part, {})
            elif isinstance(parent, list) and isinstance(part, int) and part < len(parent):
                parent = parent[part]
            else:
                raise RecipeError(f"{place}: {dotted} does not lead to a value of {self.path}; check its parts")
        last = location[-1] if location else ""
        fits = isinstance(parent, dict) and isinstance(last, str)
        fits = fits or (isinstance(parent, list) and isinstance(last, int) and last < len(parent))
        if not fits:
            raise RecipeError(f"{place}: {dotted} does not lead to a value of {self.path}; check its parts")
        self._places = {at: line for at, line in self._places.items() if at[: len(location)] != location}
        self._places[location] = place
        parent[last] = self._parse(text, location, place)

    def _parse(self, text: str, location: Location, place: str | None) -> object:
        """Read one YAML document, and note its places under `location` (all as `place`, where given)."""
        where = place or str(self.path)
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            return None if node is None else self._data(loader, node, location, place)
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark and place is None else ""
            raise RecipeError(f"{where}{line}: is not valid YAML: {error.problem or error.context}") from None
        except RecipeError:
            raise
        except (yaml.YAMLError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise RecipeError(f"{where}: is not valid YAML: {reason}") from None
        except RecursionError:
            raise RecipeError(f"{where}: is nested too deeply for a recipe") from None

    def _data(self, loader: _Loader, node: yaml.Node, location: Location, place: str | None) -> object:
        def note(at: Location, mark: yaml.Mark) -> None:
            self._places[at] = place or f"{self.path}:{mark.line + 1}"

        if isinstance(node, yaml.SequenceNode):
            items: list[object] = []
            for index, item in enumerate(node.value):
                note((*location, index), item.start_mark)
                items.append(self._data(loader, item, (*location, index), place))
            return items
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            line = place or f"{self.path}:{key_node.start_mark.line + 1}"
            if key_node.tag != "tag:yaml.org,2002:str":
                raise RecipeError(f"{line}: the key {key} is not text; quote it or remove it")
            if key in values:
                raise RecipeError(f"{line}: {_dotted((*location, key))} is given twice; keep one of them")
            note((*location, key), key_node.start_mark)
            values[key] = self._data(loader, value_node, (*location, key), place)
        return values


_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """YAML without aliases (a few lines of them can expand to gigabytes), where 1e-5 is a number and `off` is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not read in a recipe; write the value out", mark)
        return super().compose_node(parent, index)


# PyYAML follows YAML 1.1, where an exponent needs a point and a sign, and `yes`, `no`, `on` and `off` are booleans;
# recipes are YAML 1.2.
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _resolve(raw: Location, values: object, model: type[BaseModel]) -> tuple[Location, type[BaseModel]]:
    """Return pydantic's location without tags of unions (kind, `:word`, type), and the model that owns its last key."""
    location: list[str | int] = []
    section, candidates = model, [model]
    for part in raw:
        if isinstance(values, dict) and values.get("kind") == part and len(candidates) > 1:
            candidates = [one for one in candidates if part in get_args(one.model_fields["kind"].annotation)]
            section = candidates[0]
            continue
        known = candidates or (isinstance(values, dict) and part in values)
        if isinstance(part, str) and (part.startswith(":") or not known):
            continue
        location.append(part)
        if isinstance(part, str):
            section = candidates[0] if candidates else section
            field = section.model_fields.get(part)
            candidates = _models(field.annotation) if field is not None else []
        try:
            values = values[part]  # type: ignore[index]
        except (TypeError, KeyError, IndexError):
            values = None
    return tuple(location), section


def _models(annotation: object) -> list[type[BaseModel]]:
    """Return the models inside an annotation, such as the variants of `tuple[A | B, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _unknown(key: str, known: list[str], beside: Collection[str]) -> str:
    """Return the clause for an unknown key; a key in `beside` is already set, so it is not suggested."""
    close = difflib.get_close_matches(key, [each for each in known if each not in beside], n=1)
    guess = f" (did you mean {close[0]!r}?)" if close else ""
    return f"is not a known key{guess}; known keys: {', '.join(known)}"


def _dotted(location: Location) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "the recipe"


def _shown(value: object) -> str:
    """Return a value roughly as YAML writes it, for a message."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _KEPT else text[: _KEPT - 3] + "..."
