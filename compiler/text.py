"""Take the tokenizer and facts about text from a checkpoint into a plan.

The compiler checks them as the runtime will read them, before any work that takes long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from outrider.compiler.formats.gguf_file import GgufFile, is_gguf
from outrider.compiler.formats.gguf_tokenizer import read_gguf_text
from outrider.compiler.formats.sentencepiece_model import make_tokenizer, read_model
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.config_reader import read_json
from outrider.plans.chat_template import REPAIR, ChatTemplate
from outrider.plans.errors import CheckpointError, OutriderError, PlanError
from outrider.plans.manifest import Text
from outrider.plans.tokenizer import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, TOOLS_TEMPLATE_FILE, Tokenizer

_SETTINGS = "tokenizer_config.json"
_PIECES, _ADDED = "tokenizer.model", "added_tokens.json"
_OTHERS = ("tekken.json", "tiktoken.model", "vocab.json", "merges.txt", "tokenizer.model.v3", "spiece.model")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_FILES = (_SETTINGS, "special_tokens_map.json")
_DEFAULT, _TOOLS = "default", "tool_use"
"""Names that Hugging Face gives to templates: of any conversation, and of those with tools."""
_PROBES = (
    [{"role": "user", "content": "Hello."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
)
"""Conversations; a chat template must render one. Some templates require a system message, others refuse it."""
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class CheckpointText:
    """A tokenizer that passed all checks, as a `tokenizer.json`; chat templates by their files; facts for the plan."""

    tokenizer: bytes
    templates: Mapping[str, str]
    text: Text

    def write(self, folder: Path) -> None:
        """Make `folder` and write the files into it."""
        folder.mkdir(parents=True)
        (folder / TOKENIZER_FILE).write_bytes(self.tokenizer)
        for name, template in self.templates.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(template, encoding="utf-8")

    def ordinary_ends(self) -> dict[int, str]:
        """Return the texts of end tokens that are no special tokens, by id: words, at which an answer would end."""
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_buffer(self.tokenizer))
        return {end: tokenizer.spelled(end) for end in self.text.eos_token_ids if not tokenizer.is_skipped(end)}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, as the runtime gives them to the model."""
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_buffer(self.tokenizer))
        return [tokenizer.encode(text) for text in texts]


def read_text(checkpoint: Path, config: DecoderConfig) -> CheckpointText:
    """Read the tokenizer of a checkpoint, with the chat templates from either place Hugging Face keeps them, or from a
    GGUF file's metadata.

    Without a `tokenizer.json` it is made of SentencePiece's `tokenizer.model`.
    """
    return _gguf(checkpoint, config) if is_gguf(checkpoint) else _folder(checkpoint, config)


def read_vocabulary(checkpoint: Path) -> dict[str, int] | None:
    """Return the ids of a checkpoint's tokens; None where it has no tokenizer."""
    if is_gguf(checkpoint):
        return read_gguf_text(GgufFile.open(checkpoint)).tokenizer.get_vocab()
    if not any((checkpoint / name).is_file() for name in (TOKENIZER_FILE, _PIECES)):
        return None
    file, content = _tokenizer_json(checkpoint, _settings(checkpoint))
    try:
        return tokenizers.Tokenizer.from_buffer(content).get_vocab()
    except Exception as error:  # the library's Rust code raises plain `Exception`
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _gguf(path: Path, config: DecoderConfig) -> CheckpointText:
    found = read_gguf_text(GgufFile.open(path))
    try:
        tokenizer = Tokenizer(found.tokenizer, source=str(path))
    except PlanError as error:
        raise CheckpointError(f"{error}; give a model with another tokenizer") from None
    _check_size(tokenizer, path, config)
    named = {"bos_token": found.bos_token, "eos_token": found.eos_token}
    special = {name: token for name, token in named.items() if token is not None}
    templates = _checked({_DEFAULT: (path, found.template), _TOOLS: (path, found.tools_template)}, special)
    text = Text(eos_token_ids=config.eos_token_ids, special_tokens=special)
    return CheckpointText(found.tokenizer.to_str().encode(), templates, text)


def _folder(checkpoint: Path, config: DecoderConfig) -> CheckpointText:
    settings = _settings(checkpoint)
    file, content = _tokenizer_json(checkpoint, settings)
    try:
        tokenizer = Tokenizer.of_json(content, file)
    except PlanError as error:
        raise CheckpointError(f"{error}; give a checkpoint with another {file.name}") from None
    marked = _marked(content, settings, _decoder(checkpoint, settings.get("added_tokens_decoder")))
    served = _without_rowless(marked, config)
    if served != content:
        tokenizer, content = Tokenizer.of_json(served, file), served
    _check_size(tokenizer, file, config)
    special = _special_tokens(settings)
    templates = _checked(_templates(checkpoint, settings), special)
    # The tokenizer's end token, too, which a chat model's configuration may lack.
    end = tokenizer.token_id(special["eos_token"]) if "eos_token" in special else None
    ends = tuple(dict.fromkeys([*config.eos_token_ids, *([] if end is None else [end])]))
    return CheckpointText(content, templates, Text(eos_token_ids=ends, special_tokens=special))


def _check_size(tokenizer: Tokenizer, file: Path, config: DecoderConfig) -> None:
    if tokenizer.last_id >= config.vocab_size:
        found = f"{file} has tokens up to id {tokenizer.last_id}, and the model {config.vocab_size} of them"
        raise CheckpointError(f"{found}; they do not belong together")


def _without_rowless(content: bytes, config: DecoderConfig) -> bytes:
    """Return a `tokenizer.json` without special tokens after the model's last row, such as a `<pad>` of training: the
    model can neither read nor write them, and their spelling is text like any other."""
    parts = json.loads(content)
    added = parts.get("added_tokens") or ()
    kept = [token for token in added if token["id"] < config.vocab_size or not token["special"]]
    if len(kept) == len(added):
        return content
    return json.dumps(parts | {"added_tokens": kept}, ensure_ascii=False).encode()


def _tokenizer_json(checkpoint: Path, settings: Mapping[str, Any]) -> tuple[Path, bytes]:
    """Return a checkpoint's `tokenizer.json` and its file, or one made of `tokenizer.model` and that file."""
    file, pieces = checkpoint / TOKENIZER_FILE, checkpoint / _PIECES
    if file.is_file():
        try:
            return file, file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    if not pieces.is_file():
        others = [name for name in _OTHERS if (checkpoint / name).is_file()]
        found = f" ({' and '.join(others)}, which is there, is not read)" if others else ""
        raise CheckpointError(
            f"{file} does not exist, nor {_PIECES}{found}; a plan carries the tokenizer. "
            "Add the model's tokenizer.json, or "
            "have transformers write it: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`"
        )
    try:
        made = make_tokenizer(read_model(pieces), settings, _added_tokens(checkpoint, settings))
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises plain `Exception`
        raise CheckpointError(f"{pieces} makes no tokenizer: {error}") from None
    return pieces, made.to_str().encode()


def _added_tokens(checkpoint: Path, settings: Mapping[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens that `tokenizer_config.json`, or in older checkpoints `added_tokens.json`, adds, by ids."""
    written = settings.get("added_tokens_decoder")
    if written is None and (file := checkpoint / _ADDED).is_file():
        written = {number: {"content": text, "normalized": False} for text, number in read_json(file).items()}
    return _decoder(checkpoint, written)


def _decoder(checkpoint: Path, written: Any) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of an `added_tokens_decoder`."""
    try:
        return {int(number): _added_token(token) for number, token in (written or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{checkpoint / _SETTINGS}: added_tokens_decoder must be an object of tokens such as "
            f'{{"32000": {{"content": "<|end|>", "special": true}}}}; found {written!r:.60}'
        ) from None


def _added_token(token: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {key: value for key, value in token.items() if isinstance(value, bool) and key in _FLAGS}
    return tokenizers.AddedToken(token["content"], **flags)


# Special tokens.


def _settings(checkpoint: Path) -> dict[str, Any]:
    """Return `tokenizer_config.json`, in older checkpoints with `special_tokens_map.json`, as transformers reads it."""
    settings, names = ({} if not (checkpoint / file).is_file() else read_json(checkpoint / file) for file in _FILES)
    return settings if "added_tokens_decoder" in settings else settings | names


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by the names under which chat templates know them."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    further = settings.get("extra_special_tokens")
    if isinstance(further, dict):
        named |= further
    texts = {name: _token(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _marked_special(settings: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Return the special tokens with a name and those of lists, as the settings write them."""
    named = [value for name, value in settings.items() if name.endswith("_token")]
    for further in (settings.get("additional_special_tokens"), settings.get("extra_special_tokens")):
        named += further if isinstance(further, list) else further.values() if isinstance(further, dict) else []
    tokens = [value if isinstance(value, dict) else {"content": value} for value in named]
    special = {"special": True}
    return [_added_token({"normalized": False} | token | special) for token in tokens if _token(token)]


def _marked(content: bytes, settings: Mapping[str, Any], added: Mapping[int, tokenizers.AddedToken]) -> bytes:
    """Return a `tokenizer.json` whose added tokens have the flags that the settings give them.

    `added` are the tokens of `added_tokens_decoder`, by id; they win over those of `tokenizer.json`. Special tokens
    that `settings` name or list print nothing, and have the flags of their own objects where they were no added tokens.
    Names of no token are left out. Flags are those of transformers' TokenizersBackend (5.23; PreTrainedTokenizerFast),
    of which its classes for models drop some, as Qwen2Tokenizer does of named tokens. Which tokens are special is as in
    these classes, since TokenizersBackend lets none of `tokenizer.json` be plain.
    """
    library = tokenizers.Tokenizer.from_buffer(content)
    size = library.get_vocab_size()
    flagged = library.get_added_tokens_decoder()
    known = {token.content: (number, _flags(token)) for number, token in flagged.items()}
    before = dict(known)
    for number, token in sorted(added.items()):
        new = library.token_to_id(token.content) is None and number == size
        if new or library.token_to_id(token.content) == number:
            size += new
            known[token.content] = (number, _flags(token))
    for token in _marked_special(settings):
        if token.content in known:
            number, flags = known[token.content]
            known[token.content] = (number, flags | {"special": True})
        elif (found := library.token_to_id(token.content)) is not None:
            known[token.content] = (found, _flags(token))
    if known == before:
        return content
    parts = json.loads(library.to_str())
    listed = sorted((number, text, flags) for text, (number, flags) in known.items())
    parts["added_tokens"] = [{"id": number, "content": text, **flags} for number, text, flags in listed]
    return json.dumps(parts, ensure_ascii=False).encode()


def _flags(token: tokenizers.AddedToken) -> dict[str, bool]:
    return {name: bool(getattr(token, name)) for name in _FLAGS}


def _token(value: Any) -> str | None:
    """Return a special token's text; the checkpoint writes it as text or as an object with the text."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


# Chat templates.


_Named = Mapping[str, tuple[Path, str | None]]
"""Templates by their names, each with the file that has it."""


def _templates(checkpoint: Path, settings: Mapping[str, Any]) -> _Named:
    """Return the chat templates. Files win over settings, as in transformers."""
    files = {_DEFAULT: checkpoint / CHAT_TEMPLATE_FILE, _TOOLS: checkpoint / TOOLS_TEMPLATE_FILE}
    found: dict[str, tuple[Path, str | None]] = {}
    for name, file in files.items():
        if file.is_file():
            try:
                found[name] = file, file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file} cannot be read as UTF-8 text: {error}") from None
    if found:
        return found
    file = checkpoint / _SETTINGS
    template = settings.get("chat_template")
    if isinstance(template, list) and template:
        named = {str(each.get("name")): each.get("template") for each in template if isinstance(each, dict)}
        if _DEFAULT not in named:
            raise CheckpointError(
                f"{file}: chat_template is a list without a template named 'default', for plain chats; it names "
                f"{', '.join(named) or 'nothing'}. Name one so, or remove the key for a plan without chat"
            )
    else:
        named = {_DEFAULT: template}
    for each in (named.get(_DEFAULT), named.get(_TOOLS)):
        if each is not None and not isinstance(each, str):
            wanted = "a text, or a list of objects with a name and a template"
            raise CheckpointError(f"{file}: chat_template must be {wanted}; found {each!r:.60}")
    return {name: (file, named.get(name)) for name in (_DEFAULT, _TOOLS)}


def _checked(named: _Named, special: Mapping[str, str]) -> dict[str, str]:
    """Return the templates by their files in a plan."""
    files = {_DEFAULT: CHAT_TEMPLATE_FILE, _TOOLS: TOOLS_TEMPLATE_FILE}
    templates = {}
    for name, (source, template) in named.items():
        if template is not None:
            _check_template(template, str(source), special, {"tools": [_TOOL]} if name == _TOOLS else {})
            templates[files[name]] = template
    return templates


def _check_template(template: str, source: str, special: Mapping[str, str], variables: Mapping[str, object]) -> None:
    """Raise `CheckpointError` unless the template renders a plain conversation."""
    try:
        chat = ChatTemplate(template, source=source, special_tokens=special)
    except PlanError as error:
        raise CheckpointError(str(error)) from None
    failures: list[OutriderError] = []
    for messages in _PROBES:
        try:
            chat.render(messages, True, variables)
            return
        except OutriderError as error:
            failures.append(error)
    raise CheckpointError(f"A plain question cannot be asked. {str(failures[0]).removesuffix(REPAIR)} {REPAIR}")
