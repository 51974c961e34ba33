"""The grammars of a plan's requests, each compiled once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from plans.errors import RequestError
from plans.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from runtime.text.grammar_compiler import Vocabulary
    from runtime.text.grammar_rule import GrammarRule

_MOST_KEPT = 64  # compiled grammars


class Grammars:
    """Compiles each grammar once for all requests. Safe to use from several threads.

    llguidance is imported, and takes over the tokenizer, at the first grammar: seconds, for a vocabulary of 150,000
    tokens. Who asks for no form does not wait for it.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """`size` is the target's vocabulary, which may be larger than the tokenizer's."""
        self.tokenizer, self._size = tokenizer, size
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def rule(self, asked: object, ends: Collection[int]) -> GrammarRule:
        """Return the rule that a text keeps to the form `asked`, a `StructuredOutputs`, and ends with one of `ends`.

        Raises RequestError for a form that is none, or that no text of the vocabulary has.
        """
        from runtime.text.grammar_rule import GrammarRule
        from runtime.text.grammar_text import to_grammar

        where, grammar = to_grammar(asked)
        if not ends:
            raise RequestError("structured_outputs is given, and the plan has no end token; pass eos_token_ids.")
        return GrammarRule(*self._compile(grammar, where), ends)

    def check_schema(self, schema: Mapping[str, object], where: str) -> None:
        """Raise RequestError, which calls it `where`, for a JSON schema that `rule` would refuse."""
        from runtime.text.grammar_text import of_schema

        self._compile(of_schema(schema, where), where)

    def _compile(self, grammar: str, where: str) -> tuple[Vocabulary, LLMatcher]:
        from runtime.text.grammar_compiler import Vocabulary, compile_grammar

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self.tokenizer, self._size)
            vocabulary, matcher = self._vocabulary, self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = compile_grammar(vocabulary.tokenizer, grammar, where)
            with self._lock:
                self._compiled[grammar] = matcher
                if len(self._compiled) > _MOST_KEPT:
                    self._compiled.popitem(last=False)
        return vocabulary, matcher
