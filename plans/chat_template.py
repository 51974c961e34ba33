"""Messages to a prompt: the model's chat template, a program of the plan's author, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import DictLoader, TemplateError, TemplateNotFound, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from plans.errors import OutriderError, PlanError, RequestError

REPAIR = (
    "It is the checkpoint's own (chat_template.jinja, chat_template in tokenizer_config.json, or "
    "tokenizer.chat_template in a GGUF file's metadata, which `gguf-new-metadata` changes): correct it there, or "
    "remove it, so that the plan continues prompts and has no chat, and build again."
)


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message has its reasoning. Templates read the first; gpt-oss's the second."""
_DEEPEST = 64
"""Lists and mappings within another that a value may have; `tojson` and templates' macros follow them by recursion."""
_PROBE = "a probe of 1 line"


class _Content(Enum):
    """The forms of a message's content that a template prints."""

    TEXT = "text alone"
    PARTS = "a list of parts alone"
    EITHER = "either, or what cannot be told"


class ChatTemplate:
    """A model's chat template: a Jinja program that turns messages into a prompt, run in a sandbox.

    The names a template may use are those of transformers (`transformers/utils/chat_template_utils.py`), since
    that is what templates are written for: `raise_exception`, `strftime_now`, `tojson`, `{% break %}`,
    `{% generation %}`. `names` are those that this one reads and does not set, `special_names` those of special tokens.

    A message's content is a text or a list of parts. A template that knows one form alone gets it, whichever the
    message has: transformers would print a list as Python does, or nothing of a text.
    """

    def __init__(self, text: str, *, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template; `source` names it in errors, and `special_tokens` are texts by their names in templates,
        such as `bos_token`. Raises PlanError where it is no Jinja.

        A plan with such a template does not load, for completions neither: whoever serves it finds the fault at once,
        and not at the first chat.
        """
        self._source, self.text = source, text
        self.special_names = frozenset(special_tokens or ())
        # transformers has the first two in every rendering: "is defined" and "is not none" are asked of them.
        self._names: dict[str, object] = {"tools": None, "documents": None, **(special_tokens or {})}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], loader=DictLoader({})
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse_messages
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        environment.globals["namespace"] = _PublicNamespace
        environment.globals["dict"] = _new_dict
        try:
            self._template = environment.from_string(text)
            self.names = frozenset(find_undeclared_variables(environment.parse(text)))
        except Exception as error:  # Jinja compiles to Python, which has errors of its own for what it refuses
            line = f", line {error.lineno}," if isinstance(error, TemplateSyntaxError) else ""
            said = str(error).rstrip(".")
            raise PlanError(f"{source}{line} is not a Jinja template: {said}. {REPAIR}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt text. Raises RequestError and PlanError as `Tokenizer.apply_chat_template` says."""
        names = {name: _plain_data(value, name) for name, value in variables.items()}
        plain = [self._in_form(message, place) for place, message in enumerate(_plain_messages(messages))]
        return self._render(names | {"messages": plain, "add_generation_prompt": add_generation_prompt})

    def _in_form(self, message: dict[object, object], place: int) -> dict[object, object]:
        """The message with its content in the form that the template knows."""
        content = message.get("content")
        if isinstance(content, list) and self._content is _Content.TEXT:
            texts = []
            for number, part in enumerate(content):
                text = part.get("text") if isinstance(part, dict) else None
                if not isinstance(text, str):
                    raise RequestError(
                        f"messages[{place}].content[{number}] has no text, and the chat template {self._source} knows "
                        'texts alone. Pass parts such as {"type": "text", "text": "..."}.'
                    )
                texts.append(text)
            return message | {"content": "".join(texts)}
        if isinstance(content, str) and self._content is _Content.PARTS:
            return message | {"content": [{"type": "text", "text": content}]}
        return message

    @cached_property
    def _content(self) -> _Content:
        parts = [{"type": "text", "text": _PROBE}]
        if self._prints(_PROBE):
            return _Content.EITHER if self._prints(parts) else _Content.TEXT
        return _Content.PARTS if self._prints(parts) else _Content.EITHER

    def _prints(self, content: object) -> bool:
        """Whether the template prints the probe in a user's message, and not as Python prints a list."""
        question = {"role": "user", "content": content}
        for messages in ([question], [{"role": "system", "content": ""}, question]):
            try:
                text = self._render({"messages": messages, "add_generation_prompt": True})
            except OutriderError:
                continue
            if _PROBE in text and repr({"type": "text"})[:-1] not in text:
                return True
        return False

    def _render(self, names: dict[str, object]) -> str:
        try:
            return self._template.render(self._names | names)
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


class _MessagesRefusedError(TemplateError):
    """The template called `raise_exception`."""


class _PublicNamespace(Namespace):
    """Jinja's `namespace` without underscore names, through which a template could pose as another object."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named `self`, as in Jinja: `namespace(self=1)` is allowed.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what training learns from; in a prompt its content stands there.

    What is set within it is not known behind it, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _NewDict:
    """`dict`, of which a template has no more than this."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


_new_dict = _NewDict()


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold the name {name!r}")


def _refuse_messages(message: object) -> NoReturn:
    raise _MessagesRefusedError(str(message))


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


def _plain_messages(messages: object) -> list[dict[object, object]]:
    """Copies of messages of plain data, as transformers has them: without keys that are null, and with their reasoning
    under the names that templates read."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "`messages` must be a list of at least one message, each a mapping such as "
            '{"role": "user", "content": "..."}, not ' + (f"{type(messages).__name__}." if messages else "empty.")
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'messages[{place}] must be a mapping with a text under "role".')
        content = message.get("content")
        if (content is None and not message.get("tool_calls")) or isinstance(content, bool | int | float | Mapping):
            found = f"is {content!r}" if "content" in message else "is missing"
            raise RequestError(f'messages[{place}]: "content" {found}; pass its text.')
    return [_plain_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _plain_message(message: Mapping[str, object], where: str) -> dict[object, object]:
    plain: dict[object, object] = {
        _plain_data(key, f"{where} (a key)"): _plain_data(value, f"{where}.{key}")
        for key, value in message.items()
        if value is not None
    }
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


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


def check_text(text: object, what: str) -> None:
    """Raise RequestError unless `text` is a str that UTF-8 can hold."""
    if not isinstance(text, str):
        raise RequestError(f"{what} must be text (str), not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"{what} holds half a character: U+{code:04X} at index {error.start} is a lone surrogate, which UTF-8 "
            "cannot hold. Decode the text completely before passing it."
        ) from error
