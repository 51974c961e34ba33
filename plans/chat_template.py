"""Messages to a prompt: the model's chat template, a program of the plan's author, run in a sandbox."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, TemplateNotFound, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from outrider.plans.errors import OutriderError, PlanError, RequestError
from outrider.plans.template_budget import check_size
from outrider.plans.template_sandbox import Sandbox
from outrider.plans.text_check import check_text

REPAIR = (
    "It is the checkpoint's own (chat_template.jinja, chat_template in tokenizer_config.json, or "
    "tokenizer.chat_template in a GGUF file's metadata, which `gguf-new-metadata` changes): correct it there, or "
    "remove it, so that the plan continues prompts and has no chat, and build again."
)


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message has its reasoning. Templates read the first; gpt-oss's the second."""
_IN_PLACE = ("tool_calls", *_REASONING)
"""What an assistant's message may have without a content."""
_DEEPEST = 64
"""Lists and mappings within another that a value may have; `tojson` and templates' macros follow them by recursion."""
_MOST_OUTPUT = 2**26
"""Characters of a prompt."""
_PROBED = ("system", "user", "assistant")
"""Roles whose content is text, or text in parts."""
_Form = Literal["text", "parts"]
_Plain = dict[object, object]


class ChatTemplate:
    """A model's chat template: a Jinja program that turns messages into a prompt, run in a sandbox.

    The names a template may use are those of transformers (`transformers/utils/chat_template_utils.py`), since
    that is what templates are written for: `raise_exception`, `strftime_now`, `tojson`, `{% break %}`,
    `{% generation %}`. `names` are those that this one reads and does not set, `special_names` those of special tokens.

    A message's content is a text or a list of parts. What OpenAI's API has and most templates do not know reaches them
    as they know it: arguments of calls, JSON in a text there, as objects, and the developer's messages as the system's
    where the template names no developer. Where a template knows one form of a role alone, texts and parts
    that are all texts reach it in that form: transformers would print a list as Python does, or nothing of a text.
    All else is as transformers has it.
    """

    def __init__(self, text: str, *, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template; `source` names it in errors, and `special_tokens` are texts by their names in templates,
        such as `bos_token`. Raises PlanError where it is no Jinja.

        A plan with such a template does not load, for completions neither: the fault is found at once, and not at the
        first chat.
        """
        self._source, self.text = source, text
        self.special_names = frozenset(special_tokens or ())
        # transformers has the first two in every rendering: "is defined" and "is not none" are asked of them.
        self._names: dict[str, object] = {"tools": None, "documents": None, **(special_tokens or {})}
        self._environment = environment = Sandbox([loopcontrols, _GenerationBlock], {"tojson": _to_json})
        environment.globals["raise_exception"] = _refuse_messages
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(text)
            parsed = environment.parse(text)
            self.names = frozenset(find_undeclared_variables(parsed))
        except Exception as error:  # Jinja compiles to Python, which has errors of its own for what it refuses
            line = f", line {error.lineno}," if isinstance(error, TemplateSyntaxError) else ""
            said = str(error).rstrip(".")
            raise PlanError(f"{source}{line} is not a Jinja template: {said}. {REPAIR}") from error
        self._reads_parts = _reads_parts(parsed)
        self._forms: dict[frozenset[_Given], dict[str, _Form]] = {}  # at most one for each subset of six

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        """The prompt text. Raises RequestError and PlanError as `Tokenizer.apply_chat_template` says."""
        names = {name: _plain_data(value, name) for name, value in variables.items()}
        names["add_generation_prompt"] = add_generation_prompt
        plain = _plain_messages(messages, "system" if "developer" not in self.text else "developer")
        return self._render(names | {"messages": _in_forms(plain, self._forms_of(plain, names))})

    def _forms_of(self, messages: list[_Plain], names: dict[str, object]) -> dict[str, _Form]:
        """Return the forms in which contents of roles are to reach the template; those of other roles stay.

        The first way to render the conversation that prints a text of every role is taken, or the one that prints most.
        """
        given = frozenset(found for message in messages if (found := _given(message)) is not None)
        if not self._reads_parts and all(form == "text" for _, form in given):
            return {}
        if given not in self._forms:
            probes = [_probe(message) for message in messages]
            roles = sorted({role for role, _ in given})
            best, most = dict[str, _Form](), -1
            for chosen in product(*(_choices(role, given) for role in roles)):
                forms = {role: form for role, form in zip(roles, chosen, strict=True) if form is not None}
                printed = self._printed(_in_forms(probes, forms), names, given)
                if printed > most:
                    best, most = forms, printed
                if most == len(given):
                    break
            if most < len(given):  # as another conversation may have it
                return best
            self._forms[given] = best
        return self._forms[given]

    def _printed(self, probes: list[_Plain], names: dict[str, object], given: frozenset[_Given]) -> int:
        """How many of the probes' texts the template prints, and not as Python prints a list."""
        try:
            text = self._render(names | {"messages": probes}).lower()
        except OutriderError:
            return 0
        return sum(_probe_text(each) in text and f"'text': '{_probe_text(each)}" not in text for each in given)

    def _render(self, names: dict[str, object]) -> str:
        try:
            self._environment.begin()
            pieces, size = list[str](), 0
            for piece in self._template.generate(self._names | names):
                pieces.append(piece)
                size += len(piece)
                if size > _MOST_OUTPUT:
                    raise OverflowError(f"it writes more than {_MOST_OUTPUT} characters")
            return "".join(pieces)
        except _MessagesRefusedError as error:
            raise RequestError(f"The chat template {self._source} refuses these messages: {error}") from error
        except TemplateNotFound as error:
            raise PlanError(
                f"The chat template {self._source} includes {error.name!r}, and a plan's template stands alone. "
                f"{REPAIR}"
            ) from error
        except SecurityError as error:
            raise PlanError(
                f"The chat template {self._source} does what the sandbox forbids: {str(error).rstrip('.')}. {REPAIR}"
            ) from error
        except Exception as error:  # a template is a program: it can fail in any way a program can
            kind = type(error).__name__
            raise RequestError(
                f"The chat template {self._source} failed on these messages ({kind}: {error}). "
                "Check that they hold what the model's template expects."
            ) from error


# The form of contents.


_Given = tuple[str, _Form]
"""A role, and the form of a content that it has in a conversation."""


def _reads_parts(template: nodes.Template) -> bool:
    """Whether the template may read the texts of parts: they have the name `text`."""
    names = [each.attr for each in template.find_all(nodes.Getattr)]
    return "text" in [*names, *(each.value for each in template.find_all(nodes.Const))]


def _given(message: _Plain) -> _Given | None:
    """Return the role and the form of a message; None where its content can have no other form."""
    role, content = message["role"], message.get("content")
    if role not in _PROBED or not content:
        return None
    if isinstance(content, str):
        return str(role), "text"
    return (str(role), "parts") if _are_texts(content) else None


def _are_texts(content: object) -> bool:
    """Whether a content is a list of parts that are all texts."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def _choices(role: str, given: frozenset[_Given]) -> list[_Form | None]:
    """Return the forms that contents of a role may get; None, first, leaves them as they are."""
    here = {form for other, form in given if other == role}
    others: list[_Form] = [form for form in ("text", "parts") if here != {form}]
    return [None, *others]


def _in_forms(messages: list[_Plain], forms: Mapping[str, _Form]) -> list[_Plain]:
    return [_in_form(message, forms.get(str(message["role"]))) for message in messages]


def _in_form(message: _Plain, form: _Form | None) -> _Plain:
    given = _given(message)
    if form is None or given is None or given[1] == form:
        return message
    content: Any = message["content"]
    return message | {
        "content": [{"type": "text", "text": content}] if form == "parts" else "".join(part["text"] for part in content)
    }


def _probe(message: _Plain) -> _Plain:
    """The message with a text that is known again where it is printed."""
    given = _given(message)
    if given is None:
        return message
    text = _probe_text(given)
    return message | {"content": text if given[1] == "text" else [{"type": "text", "text": text}]}


def _probe_text(given: _Given) -> str:
    return "a probe of {} as {}".format(*given)


class _MessagesRefusedError(TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks what training learns from; in a prompt its content stands there.

    What is set within it is not known after it, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _refuse_messages(message: object) -> NoReturn:
    raise _MessagesRefusedError(str(message))


def _now(pattern: str) -> str:
    check_size(1024 * len(pattern))  # a width may stand before a letter
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers prints it for templates; Jinja's own filter escapes HTML characters."""
    if isinstance(value, Undefined):
        raise TemplateError("tojson was given a value that is not defined")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain_messages(messages: object, developer: str) -> list[_Plain]:
    """Copies of messages of plain data, as transformers has them: without keys that are null, and with their reasoning
    under the names that templates read. Those of the developer have the role `developer`."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "`messages` must be a list of at least one message, each a mapping such as "
            '{"role": "user", "content": "..."}, not ' + (f"{type(messages).__name__}." if messages else "empty.")
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'messages[{place}] must be a mapping with a text under "role".')
        content, role = message.get("content"), message["role"]
        empty = content is None and not (role == "assistant" and any(message.get(key) for key in _IN_PLACE))
        if empty or isinstance(content, bool | int | float) or (isinstance(content, Mapping) and role != "tool"):
            found = f"is {reprlib.repr(content)}" if "content" in message else "is missing"
            raise RequestError(f'messages[{place}]: "content" {found}; pass its text.')
    return [_plain_message(message, f"messages[{place}]", developer) for place, message in enumerate(messages)]


def _plain_message(message: Mapping[str, object], where: str, developer: str) -> _Plain:
    plain: _Plain = {
        _plain_data(key, f"{where} (a key)"): _plain_data(value, f"{where}.{key}")
        for key, value in message.items()
        if value is not None
    }
    if plain["role"] == "developer":
        plain["role"] = developer
    calls = plain.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
            found = arguments_of(text)
            function["arguments"] = text if found is None else _plain_data(found, f"{where}.tool_calls.arguments")
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def arguments_of(text: str) -> dict[str, Any] | None:
    """The arguments of a call from its JSON `text`: {} for an empty text, None for anything but an object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _plain_data(value: object, where: str, depth: int = 0) -> object:
    """A copy made of exact JSON types: objects have methods, which a template must not reach."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        check_text(value, where)
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth == _DEEPEST and isinstance(value, (Mapping, list, tuple)):
        raise RequestError(f"{where:.60} is nested in more than {_DEEPEST} lists and mappings; pass flatter data.")
    if isinstance(value, Mapping):
        return {
            _plain_data(key, f"{where} (a key)", depth + 1): _plain_data(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain_data(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]
    raise RequestError(
        f"{where} holds a {type(value).__name__}; pass text, numbers, true, false, none, lists or mappings."
    )
