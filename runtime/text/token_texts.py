"""What each token of a generation adds to its text, as log-probabilities report it."""

from __future__ import annotations

import codecs

from outrider.plans.tokenizer import TokenIds, Tokenizer, as_ids
from outrider.runtime.text.stream import CONTEXT_TOKENS


class TokenTexts:
    """The bytes and names of successive tokens that follow `context`.

    A token's bytes are its share of the text: those of a text's tokens, joined, are the text, also where a character
    has bytes of several tokens. Special tokens have none.
    """

    def __init__(self, tokenizer: Tokenizer, context: TokenIds = ()) -> None:
        tail = as_ids(context[-CONTEXT_TOKENS:])
        self._tokenizer, self._begun = tokenizer, tokenizer.decode(tail) != ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(map(tokenizer.added_bytes, tail)))
        self.length = 0
        """Characters of the text so far; one of which bytes are missing does not count."""

    def bytes_of(self, token_id: int) -> bytes:
        """What the token would add here."""
        return self._tokenizer.added_bytes(token_id, begun=self._begun)

    def name(self, token_id: int) -> str:
        """The token as text: parts of characters as OpenAI writes them (`bytes:\\xf0\\x9f`), special tokens as they are
        spelled, an id without a token by its number. Of the tokens that differ here, names do."""
        if added := self.bytes_of(token_id):
            try:
                return added.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added)
        return self._tokenizer.spelled(token_id) or f"token_id:{token_id}"

    def push(self, token_id: int) -> None:
        """Append the token to the context."""
        added = self.bytes_of(token_id)
        self._begun = self._begun or bool(added)
        self.length += len(self._utf8.decode(added))
