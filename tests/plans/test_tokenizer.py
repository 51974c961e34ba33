"""Encoding, decoding and chat templates; transformers is the oracle for templates."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from time import thread_time

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as LibraryTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.plans import template_budget
from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import PlanError, RequestError
from outrider.plans.tokenizer import Tokenizer
from tests.conftest import train_byte_level

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# What model families use beyond plain loops, each kind once.
FAMILIES = {
    "chatml": CHATML,
    "bos and trimmed blocks": """{{ bos_token }}
    {% for m in messages %}
      {% if m.role == 'user' %}
[INST] {{ m.content | trim }} [/INST]
      {% else %}
{{ m.content }}{{ eos_token }}
      {% endif %}
    {% endfor %}
""",
    "namespace and loop controls": """{%- set ns = namespace(n=0) -%}
{%- for m in messages -%}{%- if m.role == 'stop' -%}{%- break -%}{%- endif -%}
{%- set ns.n = ns.n + 1 -%}{{ ns.n }}:{{ m.content }};{%- endfor -%}""",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ '<é>' | tojson }}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ tools }}",
    "date": "{{ strftime_now('%Y') }}",
}
MESSAGES = [
    {"role": "system", "content": "Sois bref & <gentil>."},
    {"role": "user", "content": "  日本語?\n"},
    {"role": "assistant", "content": "はい 😀"},
]


def byte_level() -> LibraryTokenizer:
    return train_byte_level(("hello world, hello again: 日本語 wörld",) * 4, 300, ["<s>", "</s>"])


def pieces(decoder: decoders.Decoder | None) -> LibraryTokenizer:
    vocab = {piece: place for place, piece in enumerate(["<unk>", "▁", "▁a", "b", "c"])}
    tokenizer = LibraryTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def test_special_tokens_are_added_only_by_the_post_processor_and_only_when_wanted() -> None:
    library = byte_level()
    bare = Tokenizer(library).encode("hello")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert Tokenizer(library).encode("hello", add_special_tokens=False) == bare
    assert Tokenizer(library).encode("hello") == [0, *bare]


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_touch_prompts() -> None:
    library = byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=64)
    tokenizer = Tokenizer(library)
    for text in ["", "hello world, hello again and again", "日本語 😀 wörld\n\t", " leading", "\x00"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_decode_skips_special_tokens_and_unknown_ids_and_takes_arrays() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [0, *tokenizer.encode("hello"), 1, 100_000]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(np.array(ids, np.int64)) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello</s>"


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("decode", [-1], "Pass integers from 0 to"),
        ("decode", [2**40], "Pass integers from 0 to"),
        ("decode", ["a"], "must be whole numbers"),
        ("encode", b"bytes", r"must be text \(str\), not bytes"),
        ("encode", "abc\ud83d", r"U\+D83D at index 3 is a lone surrogate"),
        ("apply_chat_template", MESSAGES, "has no chat template"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(method: str, given: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        getattr(Tokenizer(byte_level()), method)(given)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read as UTF-8"),
        (b"[]", "is not a tokenizer"),
        (b'{"model": {"type": "Oracle"}}', "is not a tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(PlanError, match=rf"tokenizer\.json {said}.* build the plan again"):
        Tokenizer.load(tmp_path)


TOO_MUCH = [
    "{{ 'a'.ljust(2000000000) }}",
    "{{ 'a'.zfill(width=2000000000) }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ '\t'.expandtabs(2000000000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
    "{{ ('a' * 1000000)|replace('', 'b' * 1000) }}",
    "{{ 'a'|center(2000000000) }}",
    "{{ 'a b'|wordwrap(1, wrapstring='x' * 2000000) }}",
    "{{ ([[[[[1]]]]] * 1000)|tojson(indent=10000) }}",
    "{{ (['a' * 100000] * 10000)|join }}",
    "{{ ','.join(['a' * 100000] * 10000) }}",
    "{{ ([[1] * 100000] * 1000)|sum(start=[]) }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    # What is made again and again, kept, or in blocks whose text is not printed.
    "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{% set y = x.upper() %}{% endfor %}",
    "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{% set y = x[1:] %}{% endfor %}",
    "{% set x = 'a' * 4000000 %}{% for i in range(90000) %}{% set y = x.rfind('b' + 'a' * 100000) %}{% endfor %}",
    "{% set x = range(99999) | list %}{% for i in range(90000) %}{% for j in x if false %}{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(90000) %}{{ 'a' * 4000000 }}{% endfor %}{% endset %}",
    "{% set a = 'a' * 1000000 %}{% filter length %}{% for i in range(90000) %}{{ a }}{% endfor %}{% endfilter %}",
    "{% macro f() %}{% for i in range(900) %}{{ 'a' * 4000000 }}{% endfor %}{% endmacro %}{% set x = f() %}",
    "{{ (['a' * 4000000] * 1000) | map('upper') | list | length }}",
    "{{ ('<' * 4000000) | forceescape | urlencode | urlencode | urlencode | length }}",
    "{{ ('a' * 4000000) | batch(1) | batch(1) | batch(1) | batch(1) | batch(1) | list | length }}",
    # By arguments, tables and mappings.
    "{{ ('{0}' * 1000000).format('a' * 100000) }}",
    "{{ ('{a}' * 1000000).format_map({'a': 'a' * 100000}) }}",
    "{{ ('%(a)s' * 500000) % {'a': 'a' * 100000} }}",
    "{{ ('%999999d' * 1000) % ((1,) * 1000) }}",
    "{{ ('a' * 4000000).translate({97: 'b' * 4000000}) }}",
    "{{ 'a'.encode() * 2000000000 }}",
    "{{ strftime_now('%999999d' * 100000) }}",
    "{{ 2 ** 16000 // 3 }}{{ 2 ** 1000000 // 3 }}",
    "{{ lipsum(n=100000) }}",
    *(
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}" + printed
        for printed in (
            "{{ ns.s }}",
            "{{ ns.s | tojson }}",
            "{{ ns.s ~ '' }}",
            "{{ '%s' % ns.s }}",
            "{{ '{}'.format(ns.s) }}",
            "{{ ns }}",
            "{{ {'a': ns.s}.items() }}",
        )
    ),
    *(
        "{% set a, b = namespace(s=()), namespace(s=()) %}{% for i in range(40) %}"
        "{% set a.s = (a.s, a.s) %}{% set b.s = (b.s, b.s) %}{% endfor %}" + compared
        for compared in (
            "{{ a.s == b.s }}",
            "{{ 1 < 2 == (a.s >= b.s) }}",
            "{{ a.s in [b.s] }}",
            "{{ a.s is eq(b.s) }}",
            "{{ [a.s, b.s] | sort | length }}",
            "{{ [a.s].index(b.s) }}",
            "{{ {a.s: 1} | length }}",
            "{{ {}[a.s] }}",
            "{{ {}.get(a.s) }}",
        )
    ),
    "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = n.l + [[1]|batch(4000000, 'x')|first] %}"
    "{% endfor %}",
    "{% for i in range(99999) %}{% if range(99999)|select('none')|list %}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = cycler(*range(99999)) %}{% endfor %}",
]


@pytest.mark.parametrize("template", TOO_MUCH)
def test_a_template_that_takes_all_time_or_memory_fails(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "_MOST_STEPS", 2**14)  # a sixteenth: each of them counts what takes long
    monkeypatch.setattr(template_budget, "_MOST_WORK", 2**24)
    began = thread_time()
    with pytest.raises((RequestError, PlanError), match=r"failed on these messages|the sandbox forbids"):
        ChatTemplate(template, source="the test's").render([{"role": "user", "content": "hi"}], False, {})
    assert thread_time() - began < 20  # of the processor's; without limits minutes, or no end


def test_limits_of_a_template_change_no_text() -> None:
    products = (
        "{{ 2 * 3 }} {{ 'ab' * 3 }} {{ 2 * [1] }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1.5 * 2 }} {{ 0 ** 9 }} {{ -1 ** 8 }}"
    )
    assert with_template(products).apply_chat_template(MESSAGES) == "6 ababab [1, 1] 1024 0.5 3.0 0 1"
    text = (
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{% for a in messages recursive %}{{ loop.index ~ '/' ~ loop.length }}"
        "{{ m(a.content | trim) }}{{ '%05.2f' % 1.5 }}{{ '{:>4}'.format('x') }}{{ a.content.ljust(4) + '|' }}"
        "{% break %}{% endfor %}{{ messages | map(attribute='role') | join(',') }}"
    )
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "b"}]
    found = ChatTemplate(text, source="the test's").render(messages, False, {})
    assert found == "1/2<hi>01.50   x hi |user,assistant"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),  # one character of no byte, and all are text
        decoders.Sequence([decoders.Sequence([decoders.Fuse()]), decoders.Replace("▁▁", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_when_loaded(decoder: decoders.Decoder) -> None:
    with pytest.raises(PlanError, match="cannot be streamed exactly through"):
        Tokenizer(pieces(decoder))


@pytest.mark.parametrize(
    ("kind", "part", "said"),
    [
        ("normalizer", normalizers.Sequence([normalizers.Replace("ab", "c" * 100)]), None),
        (
            "normalizer",
            normalizers.Sequence([normalizers.Replace("a", "b" * 9), normalizers.Replace("b", "c" * 9)]),
            "a normalizer that makes 81 characters of one",
        ),
        (
            "decoder",
            decoders.Sequence([decoders.Replace("a", "b" * 1000), decoders.Fuse()]),
            "a decoder that makes 1000 characters of one",
        ),
    ],
)
def test_a_part_that_makes_texts_that_take_all_memory_is_refused(kind: str, part: object, said: str | None) -> None:
    library = byte_level()
    setattr(library, kind, part)
    with pytest.raises(PlanError, match=said) if said else nullcontext():
        Tokenizer(library)


@pytest.mark.parametrize(
    ("single", "ids", "says"),
    [
        ([("s", 0)] * 10 + [("A", 0)], 1000, "adds 10000 tokens"),
        ([("A", 0)] * 100, 1, "a post_processor that makes 100"),
        ([("s", 0), ("A", 0)], 1, None),
    ],
)
def test_a_post_processor_whose_tokens_take_all_memory_is_refused(
    single: list[tuple[str, int]], ids: int, says: str | None
) -> None:
    parts = json.loads(byte_level().to_str())
    entries = [{"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": kind}} for name, kind in single]
    special = {"s": {"id": "s", "ids": [0] * ids, "tokens": ["s"] * ids}}
    template = {"type": "TemplateProcessing", "single": entries, "pair": [], "special_tokens": special}
    parts["post_processor"] = {"type": "Sequence", "processors": [template]}
    library = LibraryTokenizer.from_str(json.dumps(parts))
    with pytest.raises(PlanError, match=says) if says else nullcontext():
        Tokenizer(library)


def test_decoders_within_decoders_are_read() -> None:
    library = byte_level()
    library.decoder = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()]), decoders.Fuse()])
    assert Tokenizer(library).byte_level
    inner = decoders.Sequence([decoders.Replace("▁", " "), decoders.Sequence([decoders.ByteFallback()])])
    assert not Tokenizer(pieces(inner)).byte_level


# Chat templates.


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_in_transformers(name: str, add_generation_prompt: bool) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    variables = {"enable_thinking": False, "tools": [{"name": "f"}]}
    expected, _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=FAMILIES[name],
        add_generation_prompt=add_generation_prompt,
        enable_thinking=False,
        **special,
    )
    template = ChatTemplate(FAMILIES[name], source="t", special_tokens=special)
    if name == "variables":
        assert template.render(MESSAGES, add_generation_prompt, variables) == "<think></think>[{'name': 'f'}]"
    else:
        assert template.render(MESSAGES, add_generation_prompt, variables) == expected[0]


def with_template(text: str) -> Tokenizer:
    return Tokenizer(byte_level(), ChatTemplate(text, source="chat_template.jinja"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses these messages: Roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", r"chat_template\.jinja failed on these messages"),
        ("{{ 1 / 0 }}", "failed on these messages"),
        ("{{ messages[0].content.secret() }}", "failed on these messages"),  # messages are plain data there
    ],
)
def test_a_template_that_fails_is_a_request_error(text: str, said: str) -> None:
    class Text(str):
        def secret(self) -> str:
            return "leaked"

    with pytest.raises(RequestError, match=said):
        with_template(text).apply_chat_template([{"role": "user", "content": Text("a")}])


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__call__=1) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(text: str) -> None:
    with pytest.raises((PlanError, RequestError)):
        with_template(text).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 10**(10**7) }}",
        "{% if 10**(10**7) %}{% endif %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ range(10**9) | length }}",
    ],
)
def test_a_template_makes_nothing_huge_and_nothing_at_all_when_it_is_loaded(text: str) -> None:
    began = thread_time()
    tokenizer = with_template(text)
    with pytest.raises(RequestError, match=r"failed on these messages \(OverflowError: .* (?i:too (large|big))"):
        tokenizer.apply_chat_template(MESSAGES)
    assert thread_time() - began < 2
    assert with_template("{{ 'x' | center(10**8) | length }}").check_chat()  # which would take 100 MB
    assert thread_time() - began < 2


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ("hello", "not str"),
        ({"role": "user"}, "not dict"),
        (["hello"], r"messages\[0\] must be a mapping"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] must be a mapping with a text"),
        ([{"role": "user", "content": object()}], r"messages\[0\]\.content holds a object"),
        ([{"role": "user", "content": "\udc00"}], r"messages\[0\]\.content holds half a character"),
        ([{"role": "user", "content": [{"text": b""}]}], r"messages\[0\]\.content\[0\]\.text holds a bytes"),
    ],
)
def test_messages_that_are_no_conversation_are_refused_with_their_place(messages: object, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        with_template(CHATML).apply_chat_template(messages)  # type: ignore[arg-type]


def nested(depth: int, within: str = "a") -> object:
    value: object = "x"
    for place in range(depth):
        value = [value] if within == "list" and place % 2 else {"a": value}
    return value


@pytest.mark.parametrize(("depth", "within"), [(65, "a"), (65, "list"), (100_000, "list")])
def test_what_is_nested_too_deep_is_refused_by_its_key(depth: int, within: str) -> None:
    tokenizer = with_template("{{ tone | tojson }}{{ tools | tojson }}{{ messages | tojson }}")
    value = nested(64, within)
    tokenizer.apply_chat_template([{"role": "user", "content": "a", "x": value}], True, {"tone": value})
    value = nested(depth, within)
    question = {"role": "user", "content": "a"}
    for messages, variables, where in (
        ([question], {"tone": value}, "tone"),
        ([question], {"tools": [value]}, r"tools\[0\]"),
        ([question, question | {"content": [value]}], {}, r"messages\[1\].content\[0\]"),
        ([question | {"tool_calls": value}], {}, r"messages\[0\].tool_calls"),
    ):
        with pytest.raises(RequestError, match=rf"^{where}[.\[].* is nested in more than 64 lists and mappings"):
            tokenizer.apply_chat_template(messages, True, variables)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r'messages\[0\]: "content" is {.*\.\.\..*}; pass its text'):
        tokenizer.apply_chat_template([question | {"content": {"a": value}}])


def test_byte_alphabet_is_that_of_the_library() -> None:
    library = byte_level()
    before = Tokenizer(library).vocab_size
    library.add_tokens([AddedToken("é<x>", normalized=False), AddedToken("日 b", normalized=False)])
    tokenizer = Tokenizer(library)
    assert tokenizer.vocab_size == before + 2
    for token_id in range(2, tokenizer.vocab_size):
        assert tokenizer.token_bytes(token_id).decode(errors="replace") == library.decode([token_id])
