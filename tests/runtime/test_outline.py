"""Outlines: what their texts say, and what their grammar takes."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.runtime.skeleton.outline import OutlineError, outline_grammar, parse_outline

BYTES = LLTokenizer("byte")


def begins(grammar: str, text: bytes) -> LLMatcher | None:
    """A matcher after `text`; None where the grammar does not take it."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.get_error()
    return matcher if matcher.try_consume_tokens(list(text)) == len(text) else None


def takes(grammar: str, text: str) -> bool:
    matcher = begins(grammar, text.encode())
    return matcher is not None and matcher.is_accepting()


TEXT = "[PLAN]\n1.<120><None>[-]read(path)\n2.<80><search>[1]look up\n\n3.<9><None>[1,2] join \n[END]\nmore"


def test_a_plan_is_its_points() -> None:
    outline = parse_outline(TEXT)
    assert outline.direct is None
    points = [(p.number, p.tokens, p.tool, p.waits_for, p.title) for p in outline.points]
    assert points[:2] == [(1, 120, None, (), "read(path)"), (2, 80, "search", (1,), "look up")]
    assert points[2:] == [(3, 9, None, (1, 2), " join")]
    assert outline.points[1].line == "2.<80><search>[1]look up"
    assert outline.text == TEXT.removesuffix("\nmore")


@pytest.mark.parametrize(
    ("text", "direct"),
    [
        ("[DIRECT]\nimport os\n[END]\n", "import os"),
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
    line = "1.<120><None>[-]read(path)\n"
    assert takes(grammar, f"[PLAN]\n{line}[END]")
    assert takes(grammar, f"[PLAN]\n{line}2.<5><search>[1]look\n3.<7><None>[2,1]é\n[END]")
    assert takes(grammar, "[DIRECT]\nanything\n[END]\n")
    for wrong in (
        "[PLAN]\n[END]",
        f"[PLAN]\n{line}",
        f"[PLAN]\n{line}{line}[END]",
        "[PLAN]\n2.<5><None>[-]a\n[END]",
        "[PLAN]\n1.<5><other>[-]a\n[END]",
        "[PLAN]\n1.<5><None>[1]a\n[END]",
        f"[PLAN]\n{line}2.<5><None>[3]a\n[END]",
        "plain",
    ):
        assert not takes(grammar, wrong)


@pytest.mark.parametrize(
    ("title", "there"),
    [
        ("caf\u00e9 \u2028 \u0085 x", True),  # lines end at "\n" alone
        ("x[1] y", True),
        ("\u8bfb\u53d6", True),
        ("\u2003x", False),
        ("[END]", False),
        (" a", False),
    ],
)
def test_a_title_that_the_form_lets_through_is_read(title: str, there: bool) -> None:
    grammar = outline_grammar((), most=2)
    text = f"[PLAN]\n1.<10><None>[-]{title}\n[END]"
    assert takes(grammar, text) == there
    if there:
        assert [point.title for point in parse_outline(text).points] == [title]


def test_a_title_is_well_formed_utf8() -> None:
    grammar = outline_grammar((), most=2)
    for bad in (b"\xff", b"\xc3(", b"\xc0\x80", b"\xed\xa0\x80"):
        assert begins(grammar, b"[PLAN]\n1.<10><None>[-]a" + bad) is None
