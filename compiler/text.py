"""Take the tokenizer and facts about text from a checkpoint into a plan.

The compiler checks them as the runtime will read them, before any work that takes long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from compiler.formats.gguf_file import GgufFile, is_gguf
from compiler.formats.gguf_tokenizer import read_gguf_text
from compiler.models.config import DecoderConfig
from compiler.models.config_reader import read_json
from plans.chat_template import REPAIR, ChatTemplate
from plans.errors import CheckpointError, OutriderError, PlanError
from plans.manifest import Text
from plans.tokenizer import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Tokenizer

_SETTINGS = "tokenizer_config.json"
_PROBES = (
    [{"role": "user", "content": "Hello."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
)
"""Conversations; a chat template must render one. Some templates require a system message, others refuse it."""


@dataclass(frozen=True)
class CheckpointText:
    """A tokenizer that passed all checks, as a `tokenizer.json`; the chat template, if any; facts for the plan."""

    tokenizer: bytes
    template: str | None
    text: Text

    def write(self, folder: Path) -> None:
        """Make `folder` and write the files into it."""
        folder.mkdir(parents=True)
        (folder / TOKENIZER_FILE).write_bytes(self.tokenizer)
        if self.template is not None:
            (folder / CHAT_TEMPLATE_FILE).write_text(self.template, encoding="utf-8")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, as the runtime gives them to the model."""
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_buffer(self.tokenizer))
        return [tokenizer.encode(text) for text in texts]


def read_text(checkpoint: Path, config: DecoderConfig) -> CheckpointText:
    """Read the tokenizer of a checkpoint, with the chat template from either place Hugging Face keeps it, or from a
    GGUF file's metadata.

    Raises `CheckpointError` for a tokenizer that is missing, unreadable, larger than the model's vocabulary, or whose
    text cannot be streamed, and for a chat template that is not Jinja or renders no plain conversation.
    """
    return _gguf(checkpoint, config) if is_gguf(checkpoint) else _folder(checkpoint, config)


def read_vocabulary(checkpoint: Path) -> dict[str, int] | None:
    """Return the ids of a checkpoint's tokens; None where it has no tokenizer. Raises `CheckpointError`."""
    if is_gguf(checkpoint):
        return read_gguf_text(GgufFile.open(checkpoint)).tokenizer.get_vocab()
    file = checkpoint / TOKENIZER_FILE
    if not file.is_file():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library's Rust code raises plain `Exception`
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _gguf(path: Path, config: DecoderConfig) -> CheckpointText:
    found = read_gguf_text(GgufFile.open(path))
    try:
        tokenizer = Tokenizer(found.tokenizer, source=str(path))
    except PlanError as error:
        raise CheckpointError(f"{error}; give a model with another tokenizer") from None
    _check_size(tokenizer, path, config)
    text = Text(eos_token_ids=config.eos_token_ids, bos_token=found.bos_token, eos_token=found.eos_token)
    if found.template is not None:
        _check_template(found.template, str(path), text)
    return CheckpointText(found.tokenizer.to_str().encode(), found.template, text)


def _folder(checkpoint: Path, config: DecoderConfig) -> CheckpointText:
    file = checkpoint / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{file} does not exist; a plan carries the tokenizer, save it with `tokenizer.save_pretrained`"
        )
    try:
        tokenizer = Tokenizer.read(file)
    except PlanError as error:
        raise CheckpointError(f"{error}; give a checkpoint with another tokenizer.json") from None
    _check_size(tokenizer, file, config)
    settings = read_json(checkpoint / _SETTINGS) if (checkpoint / _SETTINGS).is_file() else {}
    text = Text(
        eos_token_ids=config.eos_token_ids,
        bos_token=_token(settings.get("bos_token")),
        eos_token=_token(settings.get("eos_token")),
    )
    source, template = _template(checkpoint, settings)
    if template is not None:
        _check_template(template, str(source), text)
    return CheckpointText(file.read_bytes(), template, text)


def _check_size(tokenizer: Tokenizer, file: Path, config: DecoderConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{file} has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; they do not belong together"
        )


def _template(checkpoint: Path, settings: dict[str, Any]) -> tuple[Path, str | None]:
    """Return the chat template and its file. Raises `CheckpointError` where the template cannot be read or chosen."""
    file = checkpoint / CHAT_TEMPLATE_FILE
    if file.is_file():
        try:
            return file, file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read as UTF-8 text: {error}") from None
    file = checkpoint / _SETTINGS
    template = settings.get("chat_template")
    if isinstance(template, list) and template:  # several named templates: take the one for plain chats
        named = [each for each in template if isinstance(each, dict)]
        default = [each.get("template") for each in named if each.get("name") == "default"]
        if not default:
            names = ", ".join(str(each.get("name")) for each in named) or "nothing"
            raise CheckpointError(
                f"{file}: chat_template is a list without a template named 'default', which plain chats take; it "
                f"names {names}. Name one of them 'default', or remove the key for a plan without chat"
            )
        template = default[0]
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{file}: chat_template must be a text, or a list of objects with a name and a template; found "
            f"{template!r:.60}"
        )
    return file, template


def _check_template(template: str, source: str, text: Text) -> None:
    """Raise `CheckpointError` unless the template renders a plain conversation."""
    try:
        chat = ChatTemplate(template, source=source, bos_token=text.bos_token, eos_token=text.eos_token)
    except PlanError as error:
        raise CheckpointError(str(error)) from None
    failures: list[OutriderError] = []
    for messages in _PROBES:
        try:
            chat.render(messages, True, {})
            return
        except OutriderError as error:
            failures.append(error)
    raise CheckpointError(f"A plain question cannot be asked. {str(failures[0]).removesuffix(REPAIR)} {REPAIR}")


def _token(value: Any) -> str | None:
    """Return a special token's text; the checkpoint writes it as text or as an object with the text."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
