"""Text to tokens, tokens to text, messages to a prompt: the plan's `tokenizer/` folder, loaded once.

What surprises: `tokenizers` can decode a list, but its `DecodeStream` cannot be trusted with a stream (it fails or
drops text when bytes are not valid UTF-8, and its cost grows with them). So this file also answers what ONE token
adds to a text (`token_bytes`, `continuation`), for the decoders where that question has an exact answer, and
refuses the others when the plan is loaded. `runtime/text/stream.py` builds on those answers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from outrider.plans.errors import PlanError, RequestError
from outrider.plans.text_bound import bound_of, flat_parts, parts_of
from outrider.plans.text_check import check_text

if TYPE_CHECKING:
    from outrider.plans.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOOLS_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
"""The template for conversations with tools, where a model has one for them, as Hugging Face keeps it."""

TokenIds = Sequence[int] | NDArray[np.int64]

_MOST_GROWTH = 64  # characters that a normalizer or a decoder makes of one
_MOST_ADDED = 2**12  # tokens that a post-processor puts around a text
_REPAIR = "Restore the file from the plan's source, or build the plan again."
_BYTE_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")
# Decoders under which a token adds the same text wherever it stands, but for the first token and for runs of bytes.
_LOCAL_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}


class Tokenizer:
    """The tokenizer of a plan. Immutable but for its caches; streams of any number of threads may share it."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        tools_template: ChatTemplate | None = None,
        source: str = TOKENIZER_FILE,
    ) -> None:
        """Wrap a `tokenizers` object; `source` is the name that errors give it, and `tools_template` renders
        conversations with tools in place of `chat_template`.

        Raises PlanError where its decoder has no exact token-by-token form (see `_is_byte_level`).
        """
        # A prompt that is silently cut or padded gives the wrong answer: lengths are the session's affair.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template, self._tools_template = chat_template, tools_template
        self._source = source
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}

        _check_growth(tokenizer, source)
        decoder = parts_of(tokenizer.decoder, "decoders")  # none where tokens are joined with spaces
        self._byte_level = _is_byte_level(decoder, source)
        self._byte_fallback = any(part["type"] == "ByteFallback" for part in decoder)
        self._bytes: dict[int, bytes] = {}  # by token id, at most the vocabulary
        self._pieces: dict[int, str] = {}  # the same
        self._anchor, self._anchor_length = (0, 0) if self._byte_level else self._find_anchor()
        self._continuing: tokenizers.Tokenizer | None = None
        self._bound = bound_of(tokenizer, set(_BYTE_OF))

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str] | None = None) -> Tokenizer:
        """Read `tokenizer.json` and, where there are any, the chat templates from a plan's `tokenizer/` folder.

        `special_tokens` are the texts that templates may print by name, such as `bos_token`. Raises PlanError for a
        file that is missing, unreadable or wrong.
        """
        files = [folder / CHAT_TEMPLATE_FILE, folder / TOOLS_TEMPLATE_FILE]
        try:
            texts = [_read(file) if os.path.lexists(file) else None for file in files]
            tokenizer = cls.read(folder / TOKENIZER_FILE)
        except PlanError as error:
            raise PlanError(f"{error}. {_REPAIR}") from error
        tokenizer._chat_template, tokenizer._tools_template = (
            None if text is None else _chat_template(text, file, special_tokens)
            for file, text in zip(files, texts, strict=True)
        )
        return tokenizer

    @classmethod
    def read(cls, file: Path) -> Tokenizer:
        """The tokenizer in a `tokenizer.json`. Raises PlanError where it cannot be read, or not streamed exactly."""
        return cls.of_json(_read(file).encode(), file)

    @classmethod
    def of_json(cls, content: bytes, file: Path) -> Tokenizer:
        """The tokenizer that the content of a `tokenizer.json` describes; `file` is what errors name. Raises PlanError
        as `read` does."""
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise PlanError(f"{file} is not a tokenizer that can be read: {error}") from error
        return cls(tokenizer, source=str(file))

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows, added tokens included. A model's logits may be wider (padding)."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def last_id(self) -> int:
        """The largest id of a token; -1 where there is none."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        With `add_special_tokens` the tokenizer's own post-processor may add tokens around the text (Llama: the
        beginning-of-sequence token; Qwen: none); nothing else ever does. Pass False for a text rendered by
        `apply_chat_template`, which spells its special tokens out. Special tokens spelled in the text are encoded as
        such in both cases. Takes seconds for a text of megabytes: ask `least_tokens` first whether it can be of use.
        Raises RequestError for what is not text.
        """
        check_text(text, "The prompt")
        return _encoded(self._tokenizer, text, add_special_tokens)

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of `text` where it continues from another: nothing is put before it, and no token is special."""
        if self._continuing is None:
            self._continuing = _without_prefix(self._tokenizer)
        return _encoded(self._continuing, text, add_special_tokens=False)

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` becomes at least, known without encoding it; 0 where nothing is known."""
        return self._bound.least_tokens(text)

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not valid UTF-8 become U+FFFD, ids without a token become nothing.

        Raises RequestError for an id that is negative or no integer.
        """
        ids = as_ids(token_ids)
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"The token ids cannot be decoded: {error}. Pass integers from 0 to {self.vocab_size - 1}."
            ) from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`.

        `variables` are further names that the model's template knows, such as `tools` or `enable_thinking`. Raises
        RequestError without a template, for messages that are no conversation or that the template refuses, and
        PlanError for a template that does what it may not.
        """
        variables = variables or {}
        template = self.check_chat(tools=variables.get("tools") is not None)
        return template.render(messages, add_generation_prompt, variables)

    def check_chat(self, *, tools: bool = False) -> ChatTemplate:
        """The chat template of conversations, of those with `tools` or without. Raises RequestError where the plan has
        none."""
        if tools and self._tools_template is not None:
            return self._tools_template
        if self._chat_template is None:
            raise RequestError(
                f"The plan has no chat template ({CHAT_TEMPLATE_FILE} beside {self._source}), so messages cannot be "
                "turned into a prompt. Pass the prompt as text, or build the plan from a checkpoint with a template."
            )
        return self._chat_template

    # What one token adds to a text.

    @property
    def byte_level(self) -> bool:
        """True where a text is the tokens' bytes, one after another (`token_bytes`); else `continuation` serves."""
        return self._byte_level

    def is_skipped(self, token_id: int) -> bool:
        """True for special tokens and for ids without a token: they print nothing and part nothing."""
        token = self._tokenizer.id_to_token(token_id)
        return token is None or token in self._special

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None where there is none."""
        return self._tokenizer.token_to_id(token)

    def spelled(self, token_id: int) -> str:
        """The text of one token, as it is spelled where it is special; none where there is no token."""
        return self.decode([token_id], skip_special_tokens=False)

    @property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id, as they are spelled."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in added if token.special}

    def text_bytes(self) -> list[bytes]:
        """Bytes that each token adds to a text that has begun; none for skipped tokens and ids without one."""
        ids = range(self.last_id + 1)
        if self._byte_level:
            return [self.token_bytes(token_id) for token_id in ids]
        texts = self._tokenizer.decode_batch([[self._anchor, token_id] for token_id in ids])
        return [
            b"" if self.is_skipped(token_id) else self.fallback_byte(token_id) or text[self._anchor_length :].encode()
            for token_id, text in zip(ids, texts, strict=True)
        ]

    def added_bytes(self, token_id: int, *, begun: bool = True) -> bytes:
        """Bytes that one token adds to a text that has `begun`, or begins a text with; none for skipped tokens."""
        if self._byte_level:
            return self.token_bytes(token_id)
        if self.is_skipped(token_id):
            return b""
        text = self.continuation([token_id]) if begun else self.decode([token_id])
        return self.fallback_byte(token_id) or text.encode()

    def fallback_byte(self, token_id: int) -> bytes:
        """The byte that a token such as `<0xE2>` stands for in a tokenizer with byte fallback; none for others."""
        token = self._tokenizer.id_to_token(token_id) if self._byte_fallback else None
        return bytes.fromhex(token[3:5]) if token is not None and _BYTE_FALLBACK.fullmatch(token) else b""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level tokenizer; none for a skipped one."""
        known = self._bytes.get(token_id)
        if known is None:
            token = "" if self.is_skipped(token_id) else self._tokenizer.id_to_token(token_id) or ""
            # As the library decodes: a token with any character outside the byte alphabet is plain text.
            in_alphabet = all(character in _BYTE_OF for character in token)
            known = bytes(_BYTE_OF[character] for character in token) if in_alphabet else token.encode()
            self._bytes[token_id] = known
        return known

    def continuation(self, token_ids: list[int]) -> str:
        """Text that tokens add after a text that has begun. Not for byte-level tokenizers.

        Exact where the list neither starts nor ends inside a run of byte-fallback tokens.
        """
        if len(token_ids) > 1:
            return self._continue(token_ids)
        known = self._pieces.get(token_ids[0])
        if known is None:
            known = self._pieces[token_ids[0]] = self._continue(token_ids)
        return known

    def _continue(self, token_ids: list[int]) -> str:
        return self.decode([self._anchor, *token_ids])[self._anchor_length :]

    def _find_anchor(self) -> tuple[int, int]:
        """A token that prints a plain word: after it, no token is the first one. Returns its id and its length."""
        for token_id in sorted(self._tokenizer.get_vocab(with_added_tokens=True).values()):
            if not self.is_skipped(token_id) and not self.fallback_byte(token_id):
                text = self.decode([token_id])
                if text.isascii() and text.isalnum():
                    return token_id, len(text)
        raise PlanError(f"{self._source} has no token that prints a letter or a digit")


def as_ids(token_ids: TokenIds) -> list[int]:
    """Token ids as Python integers: NumPy scalars are slow as keys and as list elements.

    Raises RequestError for what is no list of whole numbers.
    """
    if isinstance(token_ids, np.ndarray):
        ids: list[int] | None = token_ids.tolist() if token_ids.ndim == 1 else None
    elif isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray | memoryview):
        ids = [int(i) if isinstance(i, np.integer) else i for i in token_ids]
    else:
        ids = None
    if ids is None:
        raise RequestError(f"Pass text or a list of token ids, not a {type(token_ids).__name__}.")
    wrong = next((i for i in ids if type(i) is not int), None)
    if wrong is not None:
        raise RequestError(f"Token ids must be whole numbers; {wrong!r} is none.")
    return ids


def _encoded(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises RequestError for one at which the library fails."""
    try:
        # Unlike `encode`, the library's batches let other threads of Python run, and leave out offsets.
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of the library's Rust code, and no Exception
            raise RequestError(f"The tokenizer fails on the text ({error!s:.200}); pass a shorter one.") from None
        raise


def _chat_template(text: str, file: Path, special_tokens: Mapping[str, str] | None) -> ChatTemplate:
    from outrider.plans.chat_template import ChatTemplate  # with Jinja, which plans without a template do without

    return ChatTemplate(text, source=str(file), special_tokens=special_tokens)


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise OSError("it is no file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _without_prefix(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that puts no space before a text, and takes special tokens that the text spells for plain text."""
    parts = json.loads(tokenizer.to_str())
    parts["normalizer"] = _without_prepend(parts["normalizer"])
    for part in flat_parts(parts["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    copy = tokenizers.Tokenizer.from_str(json.dumps(parts))
    copy.encode_special_tokens = True
    return copy


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    parts = [part for each in normalizer["normalizers"] if (part := _without_prepend(each)) is not None]
    return {"type": "Sequence", "normalizers": parts} if parts else None


def _check_growth(tokenizer: tokenizers.Tokenizer, source: str) -> None:
    """Raise PlanError where a part can make a text, or its tokens, so long that they take all memory."""
    for kind, within in (("normalizer", "normalizers"), ("decoder", "decoders"), ("post_processor", "processors")):
        growth, added = 1, 0
        for each in parts_of(getattr(tokenizer, kind), within):
            if each["type"] == "Replace":
                plain = each["pattern"].get("String")
                growth *= max(1, -(-len(each["content"]) // len(plain)) if plain else 1 + len(each["content"]))
            elif each["type"] == "TemplateProcessing":
                special = [entry["SpecialToken"]["id"] for entry in each["single"] if "SpecialToken" in entry]
                growth *= (texts := max(1, len(each["single"]) - len(special)))
                added = added * texts + sum(len(each["special_tokens"][name]["ids"]) for name in special)
        if growth > _MOST_GROWTH:
            raise PlanError(
                f"{source} has a {kind} that makes {growth} characters of one, and texts that take all memory; at most "
                f"{_MOST_GROWTH} are taken"
            )
        if added > _MOST_ADDED:
            said = f"adds {added} tokens to a text; at most {_MOST_ADDED} are taken"
            raise PlanError(f"{source} has a {kind} that {said}")


def _is_byte_level(decoder: list[dict[str, Any]], source: str) -> bool:
    """Whether tokens are bytes (GPT-2, Llama 3, Qwen) or pieces of text (Llama 2, Gemma, WordPiece).

    Raises PlanError where what a token prints depends on tokens that come later, so that no text can be streamed
    that is sure to stand.
    """
    kinds = [part["type"] for part in decoder]
    if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
        return True
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    for place, part in enumerate(decoder):
        kind = part["type"]
        # Once tokens are fused, a rule sees the whole text: only one that looks at single characters stays local.
        local = kind in _LOCAL_DECODERS
        if place > fused and kind == "Replace":
            local = len(part["pattern"].get("String", "..")) == 1
        if place > fused and kind == "Strip":
            local = part["stop"] == 0
        if not local:
            raise PlanError(
                f"{source} has the decoder {' + '.join(kinds)}, and text cannot be streamed exactly through {kind} "
                "there. Outrider serves ByteLevel decoders and those made of " + ", ".join(sorted(_LOCAL_DECODERS))
            )
    return False


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's `bytes_to_unicode`, turned round).

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
