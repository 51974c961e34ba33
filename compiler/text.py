"""The tokenizer's files and facts, from a checkpoint into a plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from compiler.models.config import DecoderConfig
from plans.errors import CheckpointError
from plans.manifest import Text


def write_tokenizer(checkpoint: Path, folder: Path, config: DecoderConfig) -> Text:
    """Copy `tokenizer.json` and the chat template (from either place Hugging Face keeps it) into `folder`.

    Raises `CheckpointError` for a tokenizer that is missing, unreadable, or larger than the model's vocabulary.
    """
    tokenizer = checkpoint / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(
            f"{tokenizer} does not exist; a plan carries the tokenizer, save it with `tokenizer.save_pretrained`"
        )
    try:
        size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{tokenizer} cannot be read: {error}") from None
    if size > config.vocab_size:
        raise CheckpointError(
            f"{tokenizer} has {size} tokens, the model {config.vocab_size}; they do not belong together"
        )
    folder.mkdir(parents=True)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    settings = _settings(checkpoint / "tokenizer_config.json")
    template = _template(checkpoint, settings)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Text(
        eos_token_ids=config.eos_token_ids,
        bos_token=_token(settings.get("bos_token")),
        eos_token=_token(settings.get("eos_token")),
    )


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _template(checkpoint: Path, settings: dict[str, Any]) -> str | None:
    file = checkpoint / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates: the one for plain chats
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _token(value: Any) -> str | None:
    """A special token is written as text or as an object with its text."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
