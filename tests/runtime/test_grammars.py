"""Grammars on tokenizers of both kinds: what masks allow, how a rule follows paths, what it forces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text import grammar_compiler, grammar_rule
from outrider.runtime.text.grammar_rule import GrammarRule
from outrider.runtime.text.grammar_text import MOST_CHOICES, to_grammar
from outrider.runtime.text.grammars import Grammars
from tests import tokenizer_families as families

WORDS = ["import os", "import sys", "return", "naïve", "日本", "日本語", '{"a": 1}', "a  b", "</s>", "[END]"]


MORE = 5  # tokens that only the target has
KINDS = {"byte-level": families.tekken, "byte fallback": families.llama, "metaspace": families.metaspace}


@cache
def grammars_of(kind: str) -> tuple[Tokenizer, Grammars, int]:
    tokenizer = Tokenizer(KINDS[kind]())
    size = tokenizer.vocab_size + MORE
    return tokenizer, Grammars(tokenizer, size), size


def end_of(tokenizer: Tokenizer) -> int:
    return next(token for token, text in tokenizer.special_tokens.items() if text == "</s>")


def allowed(rule: GrammarRule, path: Sequence[int], size: int) -> list[int]:
    logits = np.zeros(size, np.float32)
    rule.apply(logits, list(path))
    assert set(logits) <= {0.0, -np.inf}
    found: list[int] = np.flatnonzero(logits == 0).tolist()
    return found


def bytes_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    texts = tokenizer.text_bytes()
    return b"".join(texts[token] for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=5, unique=True), seed=st.integers(0, 2**32 - 1))
def test_what_is_allowed_leads_to_a_text_of_the_grammar(kind: str, words: list[str], seed: int) -> None:
    tokenizer, grammars, size = grammars_of(kind)
    end = end_of(tokenizer)
    rule = grammars.rule({"choice": words}, [end]).begin([])
    encoded = [word.encode() for word in words]
    drawn, path = np.random.default_rng(seed), list[int]()
    while True:
        so_far = bytes_of(tokenizer, path)
        choices = allowed(rule, path, size)
        assert (end in choices) == (so_far in encoded) or choices == rule.forced(path, 1)
        for token in choices:
            text = so_far + bytes_of(tokenizer, [token])
            assert token == end or (text != so_far and any(word.startswith(text) for word in encoded))
        path.append(int(drawn.choice(choices)))
        if path[-1] == end:
            break
    assert so_far in encoded
    anchor = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.decode([*anchor, *path]).endswith(so_far.decode())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_a_path_has_one_mask(kind: str, data: st.DataObject, seed: int) -> None:
    tokenizer, grammars, size = grammars_of(kind)
    form = data.draw(
        st.sampled_from(
            [
                {"choice": WORDS},
                {"regex": "(the| end| o){1,8}é?"},
                {"json_object": True},
                {"json": {"type": "array", "items": {"enum": ["import", "return"]}, "maxItems": 3}},
                {"grammar": 'start: part "." start | "!"\npart[max_tokens=3]: /[a-z]*/'},
            ]
        )
    )
    end, drawn = end_of(tokenizer), np.random.default_rng(seed)
    rule, path = grammars.rule(form, [end]).begin([]), list[int]()
    for _ in range(12):
        choices = allowed(rule, path, size)
        assert choices == allowed(grammars.rule(form, [end]).begin([]), path, size)
        forced = rule.forced(path, 4)
        assert forced == grammars.rule(form, [end]).begin([]).forced(path, 4)
        path.append(int(drawn.choice(choices)))
        if path[-1] == end or drawn.random() < 0.3:
            del path[int(drawn.integers(len(path))) :]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_forced_is_what_masks_allow(kind: str) -> None:
    tokenizer, grammars, size = grammars_of(kind)
    schema = {"type": "object", "properties": {"import": {"const": "é1 </s>"}}, "required": ["import"]}
    form = {"json": schema | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}}
    rule, path, forced = grammars.rule(form, [end_of(tokenizer)]).begin([]), list[int](), 0
    while (choices := allowed(rule, path, size)) != [end_of(tokenizer)]:
        tokens = rule.forced(path, 100)
        for token in tokens:
            assert allowed(rule, path, size) == [token]
            path.append(token)
        forced += len(tokens)
        if not tokens:
            path.append(choices[0])
    assert bytes_of(tokenizer, path).decode() == '{"import":"é1 </s>"}'
    assert forced > len(path) / 2
    assert rule.forced([], 2) == path[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_is_spelled_as_the_tokenizer_spells_it(kind: str) -> None:
    """With no space before it, and with no special token where the text only looks like one."""
    tokenizer, grammars, _ = grammars_of(kind)
    rule = grammars.rule({"regex": "the end</s> of the world"}, [end_of(tokenizer)]).begin([])
    forced = list(rule.forced([], 100))
    assert len(forced) >= 5
    assert forced == tokenizer.encode_continuation("the end</s> of the world")[: len(forced)]
    assert end_of(tokenizer) not in forced


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_text_are_never_allowed(kind: str) -> None:
    """Neither those that the target has more than the tokenizer, nor special ones, unless the grammar names them."""
    tokenizer, grammars, size = grammars_of(kind)
    end = end_of(tokenizer)
    anything = allowed(grammars.rule({"regex": "(.|\n)*"}, [end]).begin([]), [], size)
    assert max(anything) < size - MORE
    assert {token for token in anything if token in tokenizer.special_tokens} == {end}
    named = allowed(grammars.rule({"grammar": "start: <[*]>"}, [end]).begin([]), [], size)
    assert max(named) < size - MORE
    assert end not in named


def test_a_text_ends_with_the_tokens_of_its_request_alone() -> None:
    tokenizer, grammars, size = grammars_of("byte-level")
    texts = tokenizer.text_bytes()
    letter = texts.index(b"b")
    rule = grammars.rule({"regex": "ab?"}, [letter, 0]).begin([])
    a = texts.index(b"a")
    assert allowed(rule, [], size) == [a]
    assert allowed(rule, [a], size) == sorted([0, letter])  # as an end, not as text
    other = grammars.rule({"regex": "ab"}, [letter]).begin([])
    with pytest.raises(RequestError, match="does not allow the text so far"):
        allowed(other, [a, a], size)
    assert allowed(other, [], size) == [a]  # an earlier path, after one that was not allowed


def test_a_text_does_not_pay_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose lexer has a state for every text of 20 letters, and room for few of them."""
    monkeypatch.setitem(grammar_compiler._LIMITS, "max_lexer_states", 200)
    tokenizer, grammars, size = grammars_of("byte-level")
    letters = [tokenizer.text_bytes().index(letter) for letter in (b"a", b"b")]
    for seed in range(8):
        drawn, path = np.random.default_rng(seed), list[int]()
        rule = grammars.rule({"regex": "([ab]*a[ab]{20})*b"}, [0]).begin([])
        for _ in range(60):
            assert set(letters) <= set(allowed(rule, path, size))
            path.append(int(drawn.choice(letters)))


def test_long_lists() -> None:
    """Thousands of choices, and a right-recursive rule."""
    tokenizer, grammars, size = grammars_of("byte-level")
    rule = grammars.rule({"grammar": 'start: item start | item\nitem: /[a-z]/ ","'}, [0]).begin([])
    path = [tokenizer.text_bytes().index(text) for text in (b"a", b",")] * 500
    for length in range(100, 1001, 100):
        assert len(allowed(rule, path[:length], size)) > 1
    rule = grammars.rule({"choice": [f"c{place}" for place in range(MOST_CHOICES)]}, [0]).begin([])
    path = [tokenizer.text_bytes().index(each.encode()) for each in "c2999"]
    for length in range(len(path)):
        assert path[length] in allowed(rule, path[:length], size)
    assert 0 in allowed(rule, path, size)


def test_a_text_that_is_too_much_to_read_is_said_to_be() -> None:
    tokenizer, grammars, size = grammars_of("byte-level")
    rule = grammars.rule({"grammar": 'start: "a" start'}, [0]).begin([])
    path = [tokenizer.text_bytes().index(b"a")]
    assert allowed(rule, [], size) == path
    rule.forced(path, 5)
    with pytest.raises(RequestError, match="The grammar cannot be served: parser error: Too many items"):
        allowed(rule, path, size)


AMBIGUOUS = {"grammar": 'start: s\ns: s s | "a" | "b"'}


def test_an_ambiguous_grammar_ends_its_text_before_masks_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same token whenever it is asked for, since items are counted; at once where the text is there at once."""
    monkeypatch.setattr(grammar_compiler, "_ROW", 200)
    tokenizer, grammars, size = grammars_of("byte-level")
    path, ends = [tokenizer.text_bytes().index(b"a")] * 200, list[int]()

    def follow(rule: GrammarRule, step: int) -> None:
        for length in range(step, 201, step):
            allowed(rule, path[:length], size)

    for step in (10, 10, 200):
        rule = grammars.rule(AMBIGUOUS, [0]).begin([])
        with pytest.raises(RequestError, match=r"cannot be served: .*items.*\. Make it simpler"):
            follow(rule, step)
        ends.append(len(rule._path))
    assert ends[0] == ends[1] < 150
    assert ends[2] < 150


def test_a_panic_forces_nothing() -> None:
    rule = grammars_of("byte-level")[1].rule(AMBIGUOUS, [0]).begin([])
    rule._matcher = Mock(**{"try_consume_tokens.side_effect": BaseException("a panic")})
    assert rule.forced([1], 5) == ()


def test_a_text_whose_masks_take_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is counted, what a place may take is not handed on to the next."""
    monkeypatch.setattr(grammar_rule, "thread_time", iter(range(1_000)).__next__)
    monkeypatch.setattr(grammar_rule, "_FREE", 0.5)
    tokenizer, grammars, size = grammars_of("byte-level")
    rule = grammars.rule(AMBIGUOUS, [0]).begin([])
    path = [tokenizer.text_bytes().index(b"a")] * 9
    rule.forced(path[:1], 1)
    allowed(rule, path[:2], size)
    allowed(rule, path[:2], size)
    with pytest.raises(RequestError, match=r"takes too long to follow after 3 tokens\. Make it simpler"):
        allowed(rule, path[:3], size)
    allowed(grammars.rule(AMBIGUOUS, [0]).begin([]), path, size)


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('# a comment\nroot ::= part+\npart ::= "\\u00e9" | "\\u0041"', ["é", "Aé"], ["A0", "u"]),
        (r'root ::= [\U0001F600\x41a&&b]+ "\\u0041"', [r"😀A&b\u0041"], ["", r"~\u0041"]),
        ("start[max_tokens=9]: /.*/", ["x ::= y"], []),
        ('?start: "a ::= b"', ["a ::= b"], ["a"]),
    ],
)
def test_grammars_of_llama_cpp_are_distinguished_from_those_for_lark(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    _, text = to_grammar({"grammar": grammar})
    for each in (*texts, *others):
        matcher, encoded = LLMatcher(LLTokenizer("byte"), text, log_level=0), list(each.encode())
        assert not matcher.get_error()
        taken = matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()
        assert taken == (each in texts)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (5, "exactly one of the keys json, json_object, regex, grammar, choice"),
        ({"regex": "a", "json_object": True}, "exactly one of the keys"),
        ({"structural_tag": "x"}, "exactly one of the keys"),
        ({"regex": "(["}, r"regex has a regular expression that cannot be read, \(\[: unclosed character class"),
        ({"regex": 1}, "regex must be text"),
        ({"grammar": "start: foo"}, 'grammar cannot be served at line 1, column 8: unknown name: "foo"'),
        ({"grammar": "root ::= a"}, "grammar is no grammar of llama.cpp's: Rule 'a' not found"),
        ({"grammar": 'root ::= "a\\'}, "grammar is no grammar of llama.cpp's: it ends inside a text"),
        ({"grammar": "root ::= [z-a]"}, r"grammar, turned into Lark, has a regular expression .*, \[z-a\]: invalid"),
        ({"grammar": 'start: start "a"'}, "grammar has no text that the plan's tokens can spell"),
        ({"json": {"type": "strin"}}, "json cannot be served: Invalid type: strin"),
        ({"json": {"pattern": "(?=a)b"}}, r"json has a regular expression .*, \(\?=a\)b: look-around"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": {"const": "\ud800"}}, "json cannot be served: unexpected end of hex escape"),
        (
            {"json": reduce(lambda inner, _: {"type": "array", "items": inner}, range(200), {})},
            "recursion limit exceeded",
        ),
        ({"json_object": False}, "json_object is False; pass true"),
        ({"choice": []}, "choice must be a list of 1 to 10000 texts"),
        ({"choice": ["a", ""]}, r"choice\[1\] is empty"),
        ({"choice": ["\ud800"]}, r"choice\[0\] holds half a character"),
    ],
)
def test_a_form_that_is_none_is_refused_in_a_sentence(form: object, said: str) -> None:
    tokenizer, grammars, _ = grammars_of("byte-level")
    with pytest.raises(RequestError, match=said) as refused:
        grammars.rule(form, [end_of(tokenizer)])
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
    with pytest.raises(RequestError, match="there is no end token; pass eos_token_ids"):
        grammars.rule({"choice": ["a"]}, [])
