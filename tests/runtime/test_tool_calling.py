"""Calls of tools: what their grammars take, and how an answer's text is read, independent of how it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import RequestError
from outrider.runtime.server.tool_calling import ToolCalling, joined
from outrider.runtime.server.tool_formats import HERMES, LLAMA, PLAIN, ToolFormat, format_of
from outrider.runtime.text.structured_outputs import guided

BYTES = LLTokenizer("byte")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBER = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
FUNCTIONS = {"get": guided({**CITY, "additionalProperties": False}), "get-all": guided(NUMBER)}


def calling(form: ToolFormat, *, must: bool = False, several: bool = True) -> ToolCalling:
    return ToolCalling(form, FUNCTIONS, must=must, several=several)


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


ONE = '<tool_call>\n{"name": "get", "arguments": {"city": "}\\"é"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "get-all", "arguments": {"n":\n  1, "m": [{}, "]"]}}\n</tool_call>'


CITY_OF_LLAMA = '{"name": "get", "parameters": {"city": "x"}}'


@pytest.mark.parametrize(
    ("form", "text", "auto", "must", "alone"),
    [
        (HERMES, "an answer {", True, False, False),
        (HERMES, ONE, True, True, True),
        (HERMES, f"first this:\n{ONE}", True, False, False),
        (HERMES, f"{ONE}\n{TWO}", True, True, False),
        (HERMES, f"{ONE} and this", False, False, False),
        (HERMES, "a <tool_call> of mine", False, False, False),
        (HERMES, ONE.replace("get", "got"), False, False, False),
        (HERMES, ONE.replace('"city"', '"town"'), False, False, False),
        (HERMES, ONE.removesuffix("</tool_call>"), False, False, False),
        (LLAMA, "", True, False, False),
        (LLAMA, "an answer {", True, False, False),
        (LLAMA, CITY_OF_LLAMA, True, True, True),
        (LLAMA, f"{CITY_OF_LLAMA} ", False, False, False),
        (LLAMA, '{"name": "get", "arguments": {"city": "x"}}', False, False, False),
        (LLAMA, '{"an": "object"}', False, False, False),
    ],
)
def test_what_an_answer_may_be(form: ToolFormat, text: str, auto: bool, must: bool, alone: bool) -> None:
    """Without a trigger, as in Llama's format, the first character decides."""
    assert takes(calling(form).grammar, text) == auto
    assert takes(calling(form, must=True).grammar, text) == must
    assert takes(calling(form, must=True, several=False).grammar, text) == alone


def read(way: ToolCalling, pieces: list[str]) -> tuple[str, list[tuple[str, str]], bool]:
    """Content, calls, and whether the last call is whole."""
    reader = way.reader()
    found = joined([*map(reader.push, pieces), reader.finish()])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls.values()]
    assert len({call["id"] for call in found.calls.values()}) == len(calls) == reader.calls
    return found.content, calls, reader.whole


CALL = ("get", '{"city": "}\\"é"}')
SECOND = ("get-all", '{"n":\n  1, "m": [{}, "]"]}')
TEXTS: list[tuple[ToolFormat, bool, str, str, list[tuple[str, str]], bool]] = [
    (HERMES, False, "an <answer", "an <answer", [], False),
    (HERMES, False, "", "", [], False),
    (HERMES, False, ONE, "", [CALL], True),
    (HERMES, False, f"so <tool_ <{ONE}\n{TWO}", "so <tool_ <", [CALL, SECOND], True),
    (HERMES, True, ONE[:50], "", [("get", '{"city": ')], False),
    (HERMES, True, ONE[:20], "", [], False),
    (HERMES, False, f"{ONE}\n<tool_call>\n", "", [CALL], True),
    (LLAMA, False, '{"name": "get", "parameters": {}}', "", [("get", "{}")], True),
    (LLAMA, False, 'so: {"name": "get"', 'so: {"name": "get"', [], False),
    (PLAIN, True, '{"name": "get-all", "arguments": {"n": 5}}', "", [("get-all", '{"n": 5}')], True),
]


@pytest.mark.parametrize(("form", "must", "text", "content", "calls", "whole"), TEXTS)
def test_what_an_answer_says(
    form: ToolFormat, must: bool, text: str, content: str, calls: list[tuple[str, str]], whole: bool
) -> None:
    way = calling(form, must=must)
    for pieces in [text], list(text):
        assert read(way, pieces) == (content, calls, whole)
    for seed in range(30):
        drawn = random.Random(seed)
        cuts = sorted(drawn.choices(range(len(text) + 1), k=drawn.randint(0, 12)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(way, pieces) == (content, calls, whole)


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    reader = calling(HERMES).reader()
    assert reader.push("a <tool").content == "a "
    assert reader.push("box> <").content == "<toolbox> "
    assert reader.push("tool_call>\n").content == ""
    first = reader.push('{"name": "get", "arguments": {"ci').calls[0]
    assert first["function"] == {"name": "get", "arguments": '{"ci'}
    assert reader.push('ty": "x').calls[0] == {"index": 0, "function": {"arguments": 'ty": "x'}}


CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
AS_MODELS_HAVE_IT: dict[str, tuple[str, ToolFormat | None]] = {
    "qwen": (
        CALLS + """{{ '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}"""
        "{{ '}\\n</tool_call>' }}{% endfor %}",
        HERMES,
    ),
    "llama": (
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        """{{ '{"name": "' + f.name + '", ' }}{{ '"parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}{% endif %}""",
        LLAMA,
    ),
    "compact": (CALLS + """{"name":"{{ f.name }}","arguments":{{ f.arguments | tojson }}}{% endfor %}""", PLAIN),
    "granite": ("{% for c in m.tool_calls or [] %}<|tool_call|>[{{ c.function | tojson }}]{% endfor %}", None),
    "qwen-coder": (CALLS + "<tool_call>\n<function={{ f.name }}>\n</function>\n</tool_call>{% endfor %}", None),
    "named in a comment": ('{# <tool_call>, "parameters": #}', None),
    "refuses": ("{{ raise_exception('no') }}", None),
}


def chat_template(calls: str) -> ChatTemplate:
    body = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + calls + "<|end|>{% endfor %}"
    return ChatTemplate("{{ tools }}" + body, source="the test's")


@pytest.mark.parametrize("name", AS_MODELS_HAVE_IT)
def test_the_format_is_that_of_a_call_that_the_template_prints(name: str) -> None:
    calls, form = AS_MODELS_HAVE_IT[name]
    template = chat_template(calls)
    if form is not None:
        assert format_of(template) is form
    else:
        with pytest.raises(RequestError, match=r"in no format that is served.*hermes, llama, json.*target.tool_parser"):
            format_of(template)
    assert format_of(template, named="hermes") is HERMES
    if form is HERMES:
        with pytest.raises(RequestError, match="with the special token '<tool_call>'"):
            format_of(template, ["<|end|>", "<tool_call>"])


def test_a_grammar_of_many_functions_is_small() -> None:
    functions: dict[str, dict[str, Any]] = {f"function_{place}": guided(CITY) for place in range(128)}
    grammar = ToolCalling(HERMES, functions, must=True, several=True).grammar
    call = {"name": "function_77", "arguments": {"city": "x"}}
    assert takes(grammar, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
