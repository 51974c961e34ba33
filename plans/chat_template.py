"""Messages to a prompt: the model's chat template, a program of the plan's author, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import DictLoader, TemplateError, TemplateNotFound, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from plans.errors import PlanError, RequestError

REPAIR = (
    "It is the checkpoint's own (chat_template.jinja, chat_template in tokenizer_config.json, or "
    "tokenizer.chat_template in a GGUF file's metadata, which `gguf-new-metadata` changes): correct it there, or "
    "remove it, so that the plan continues prompts and has no chat, and build again."
)


class ChatTemplate:
    """A model's chat template: a Jinja program that turns messages into a prompt, run in a sandbox.

    The names a template may use are those of transformers (`transformers/utils/chat_template_utils.py`), since
    that is what templates are written for: `raise_exception`, `strftime_now`, `tojson`, `{% break %}`,
    `{% generation %}`. `names` are those that this one reads and does not set.
    """

    def __init__(self, text: str, *, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        """Compile a template; `source` names it in errors. Raises PlanError where it is no Jinja.

        A plan with such a template does not load, for completions neither: whoever serves it finds the fault at once,
        and not at the first chat.
        """
        self._source, self.text = source, text
        special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], loader=DictLoader({})
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse_messages
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        environment.globals["namespace"] = _PublicNamespace
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
        names: dict[str, object] = {name: _plain_data(value, name) for name, value in variables.items()}
        names |= {"messages": _plain_messages(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names | self._special_tokens)
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
    """`{% generation %}` marks what training learns from; for a prompt its content simply stands there."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


def _plain_messages(messages: object) -> list[object]:
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
    return [_plain_data(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _plain_data(value: object, where: str) -> object:
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
    if isinstance(value, Mapping):
        return {
            _plain_data(key, f"{where} (a key)"): _plain_data(item, f"{where}.{key}") for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain_data(item, f"{where}[{place}]") for place, item in enumerate(value)]
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
