"""The grammars of a plan's requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outrider.runtime.text.grammar_compiler import Vocabulary
    from outrider.runtime.text.grammar_rule import GrammarRule

_MOST_KNOWN = 1024  # grammars


class Grammars:
    """Makes the rules of grammars, each checked once. Safe to use from several threads.

    A grammar is compiled for every text anew, about a millisecond: what llguidance learns of one text counts towards
    its limits, so that with a shared one it would depend on other requests whether a text can be served.

    llguidance is imported, and takes over the tokenizer, at the first grammar: seconds, for a vocabulary of 150,000
    tokens. Who asks for no form does not wait for it.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """`size` is the target's vocabulary, which may be larger than the tokenizer's."""
        self.tokenizer, self._size = tokenizer, size
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[bytes, None] = OrderedDict()  # hashes of grammars that are right
        self._lock = threading.Lock()

    def rule(self, asked: object, ends: Collection[int]) -> GrammarRule:
        """Return the rule that a text keeps to the form `asked`, a `StructuredOutputs`, and ends with one of `ends`.

        Raises RequestError for a form that is none, or that no text of the vocabulary has.
        """
        from outrider.runtime.text.grammar_rule import GrammarRule
        from outrider.runtime.text.grammar_text import to_grammar

        where, grammar = to_grammar(asked)
        if not ends:
            raise RequestError("structured_outputs is given, and there is no end token; pass eos_token_ids.")
        return GrammarRule(self._checked(grammar, where), grammar, ends)

    def check(self, grammar: str, where: str) -> None:
        """Raise RequestError, which calls it `where`, for a grammar, for Lark, that `rule` would refuse."""
        self._checked(grammar, where)

    def check_schema(self, schema: Mapping[str, object], where: str) -> None:
        """Raise RequestError, which calls it `where`, for a JSON schema that `rule` would refuse."""
        from outrider.runtime.text.grammar_text import of_schema

        self._checked(of_schema(schema, where), where)

    def _checked(self, grammar: str, where: str) -> Vocabulary:
        from outrider.runtime.text.grammar_compiler import Vocabulary, check_grammar
        from outrider.runtime.text.grammar_depth import check_depth

        key = sha256(grammar.encode()).digest()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self.tokenizer, self._size)
            vocabulary = self._vocabulary
            if key in self._known:
                self._known.move_to_end(key)
                return vocabulary
        check_depth(grammar, where)
        check_grammar(vocabulary.tokenizer, grammar, where)
        with self._lock:
            self._known[key] = None
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return vocabulary
