"""Automata against `re`, masks against their definition, and outlines."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.skeleton.outline import OutlineError, outline_grammar, parse_outline
from runtime.text.constraint import Vocabulary
from runtime.text.grammar import DEAD, Grammar, Piece, choice, literal, one_of, repeat, sequence

# Forms, and the regular expressions that say the same.

BYTES = b"ab<\n"
LEAF = st.sampled_from(["a", "b", "ab", "<"]).map(lambda text: (literal(text), re.escape(text)))
ANY = st.sampled_from(["ab", "a<\n"]).map(lambda text: (one_of(text.encode()), f"[{re.escape(text)}]"))


def grown(inner: st.SearchStrategy[tuple[Piece, str]]) -> st.SearchStrategy[tuple[Piece, str]]:
    def joined(parts: list[tuple[Piece, str]]) -> tuple[Piece, str]:
        return sequence(*(part for part, _ in parts)), "".join(f"(?:{text})" for _, text in parts)

    def either(parts: list[tuple[Piece, str]]) -> tuple[Piece, str]:
        return choice(*(part for part, _ in parts)), "|".join(f"(?:{text})" for _, text in parts)

    def repeated(of: tuple[Piece, str], least: int, more: int | None) -> tuple[Piece, str]:
        most = None if more is None else least + more
        return repeat(of[0], least, most), f"(?:{of[1]}){{{least},{'' if most is None else most}}}"

    lists = st.lists(inner, min_size=1, max_size=3)
    counts = st.integers(0, 2)
    return lists.map(joined) | lists.map(either) | st.builds(repeated, inner, counts, st.none() | counts)


FORMS = st.recursive(LEAF | ANY, grown, max_leaves=6)


@given(form=FORMS, text=st.lists(st.sampled_from(BYTES), max_size=7).map(bytes))
def test_an_automaton_takes_what_the_expression_takes(form: tuple[Piece, str], text: bytes) -> None:
    grammar = Grammar(form[0])
    state = grammar.follow(0, text)
    taken = re.fullmatch(form[1].encode(), text) is not None
    assert (state != DEAD and bool(grammar.ends[state])) == taken


@given(form=FORMS, tokens=st.lists(st.text("ab<\n", max_size=4), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_a_mask_has_the_tokens_that_the_text_may_go_on_with(
    form: tuple[Piece, str], tokens: list[str], seed: int
) -> None:
    grammar = Grammar(form[0])
    texts = [text.encode() for text in tokens]
    tokenizer = SimpleNamespace(byte_level=True, vocab_size=len(texts), token_bytes=texts.__getitem__)
    end = len(texts)  # an end token behind them, and one more id than the tokenizer has
    vocabulary = Vocabulary(grammar, tokenizer, end + 2, [end])  # type: ignore[arg-type]
    state = int(np.random.default_rng(seed).integers(len(grammar.table)))
    allowed = [bool(text) and grammar.follow(state, text) != DEAD for text in texts]
    assert vocabulary.mask(state).tolist() == [*allowed, bool(grammar.ends[state]), False]


# Outlines.

TEXT = "[PLAN]\n1.<120><None>[-]read(path)\n2.<80><search>[1]look up\n\n3.<9><None>[1,2] join \n[END]\nmore"


def test_a_plan_is_its_points() -> None:
    outline = parse_outline(TEXT)
    assert outline.direct is None
    assert [(p.number, p.tokens, p.tool, p.waits_for, p.title) for p in outline.points] == [
        (1, 120, None, (), "read(path)"),
        (2, 80, "search", (1,), "look up"),
        (3, 9, None, (1, 2), " join"),
    ]
    assert outline.points[1].line == "2.<80><search>[1]look up"
    assert outline.text == TEXT.removesuffix("\nmore")


@pytest.mark.parametrize(
    ("text", "direct"),
    [
        ("[DIRECT]\nimport os\n[END]\n", "import os"),
        ("[DIRECT]\nimport os", "import os"),
        ("just an answer", "just an answer"),
        ("an answer[END] and more", "an answer"),
        ("[DIRECT] of a [PLAN]\n1.<1><None>[-]x", "of a [PLAN]\n1.<1><None>[-]x"),
    ],
)
def test_what_is_no_plan_is_a_direct_answer(text: str, direct: str) -> None:
    outline = parse_outline(text)
    assert (outline.direct, outline.points) == (direct, ())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("nothing", "has no line such as"),
        ("1.<x><None>[-]a", "has no line such as"),
        ("1.<5><None>[-]", "has no line such as"),
        ("1.<5><None>[-]a\n1.<6><None>[-]b", "two points 1"),
        ("1.<5><None>[2]a\n2.<6><None>[-]b", "waits for 2"),
    ],
)
def test_a_plan_without_sense_is_refused(body: str, said: str) -> None:
    with pytest.raises(OutlineError, match=said):
        parse_outline(f"[PLAN]\n{body}\n[END]")


def test_the_form_of_an_outline_takes_outlines_alone() -> None:
    grammar = outline_grammar(["search"], most=3)

    def takes(text: str) -> bool:
        state = grammar.follow(0, text.encode())
        return state != DEAD and bool(grammar.ends[state])

    line = "1.<120><None>[-]read(path)\n"
    assert takes(f"[PLAN]\n{line}[END]")
    assert takes(f"[PLAN]\n{line}2.<5><search>[1]look\n3.<7><None>[2,1]é\n[END]")
    assert takes("[DIRECT]\nanything\n[END]\n")
    for wrong in (
        "[PLAN]\n[END]",
        f"[PLAN]\n{line}",
        f"[PLAN]\n{line}{line}[END]",
        "[PLAN]\n2.<5><None>[-]a\n[END]",
        "[PLAN]\n1.<05><None>[-]a\n[END]",
        "[PLAN]\n1.<5><other>[-]a\n[END]",
        "[PLAN]\n1.<5><None>[1]a\n[END]",
        "[PLAN]\n1.<5><None>[-] a\n[END]",
        f"[PLAN]\n{line}2.<5><None>[3]a\n[END]",
        "plain",
    ):
        assert not takes(wrong)


@pytest.mark.parametrize(
    ("title", "there"),
    [
        ("a title", True),
        ("caf\u00e9 \u2028 \u0085 x", True),  # lines end at "\n" alone
        ("x[1] y", True),
        ("\u00e9t\u00e9", True),
        ("\u8bfb\u53d6", True),
        ("\u00a0", False),
        ("\u2003x", False),
        ("\u3000x", False),
        ("[END]", False),
        (" a", False),
    ],
)
def test_a_title_that_the_form_lets_through_is_read(title: str, there: bool) -> None:
    grammar = outline_grammar((), most=2)
    text = f"[PLAN]\n1.<10><None>[-]{title}\n[END]"
    state = grammar.follow(0, text.encode())
    assert (state >= 0) == there
    if there:
        assert [point.title for point in parse_outline(text).points] == [title]


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xe2\x80(", b"\xc0\x80", b"\xed\xa0\x80"])
def test_a_title_is_well_formed_utf8(bad: bytes) -> None:
    grammar = outline_grammar((), most=2)
    assert grammar.follow(0, b"[PLAN]\n1.<10><None>[-]a" + bad) == DEAD
