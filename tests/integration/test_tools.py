"""Tools and response formats, used by OpenAI's own client over loopback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from outrider import Runtime
from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import RequestError
from tests.integration.served import client_of, listening

ASK: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "description": "does it", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
_BEFORE = """\
{% for t in tools or [] %}{{ t.function.name }}:{{ t.function.description }} {% endfor %}\
{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% for c in m.tool_calls or [] %}"""
_AFTER = "{% endfor %}{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}|{% endfor %}a"
TEMPLATE = f"{_BEFORE}!{{{{ c.function.name }}}}{{{{ c.function.arguments | tojson }}}}{_AFTER}"


def calling(before: str, key: str, after: str) -> str:
    """The template, which prints calls as objects between two texts."""
    name = f'{{"name": "{{{{ c.function.name }}}}", "{key}": {{{{ c.function.arguments | tojson }}}}}}'
    return f"{_BEFORE}{before}{name}{after}{_AFTER}"


HERMES = calling("<tool_call>\n", "arguments", "\n</tool_call>\n")
LLAMA = calling("", "parameters", "")
PLAIN = calling("", "arguments", "")


class Served:
    """A runtime whose chat template can be changed, its client, and another runtime of the same plan."""

    def __init__(self, runtime: Runtime, client: openai.OpenAI, alone: Runtime) -> None:
        self.runtime, self.client, self.alone = runtime, client, alone

    def use(self, template: str) -> None:
        for each in (self.runtime, self.alone):
            each.tokenizer._chat_template = ChatTemplate(template, source="the test's")

    def ask(self, **own: Any) -> ChatCompletion:
        found: ChatCompletion = self.client.chat.completions.create(**{"model": "toy", "messages": ASK, **own})
        return found


@pytest.fixture(scope="module")
def listened(branch_plan: Path) -> Iterator[Served]:
    runtime = Runtime.load(branch_plan, threads=1)
    with listening(runtime) as address, client_of(address) as client:
        yield Served(runtime, client, Runtime.load(branch_plan, threads=1))


@pytest.fixture
def served(listened: Served) -> Served:
    listened.use(HERMES)
    return listened


def check_call(call: Any) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("f", "now")
    if call.function.name == "f":
        Draft202012Validator(PARAMETERS).validate(arguments)


@pytest.mark.parametrize("drafter", ["none", "head"])
@pytest.mark.parametrize("template", [HERMES, LLAMA, PLAIN], ids=["hermes", "llama", "plain"])
def test_a_call_that_is_required(served: Served, template: str, drafter: str) -> None:
    served.use(template)
    tools, texts = TOOLS[:1], []
    for seed in range(3):
        own: dict[str, Any] = {"tools": tools, "tool_choice": "required", "temperature": 1.0, "seed": seed}
        own["parallel_tool_calls"] = False
        found = served.ask(**own, extra_body={"drafter": drafter})
        (choice,) = found.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        check_call(call)
        texts.append(call.function.arguments)
        pieces: list[Any] = list(served.ask(**own, stream=True, extra_body={"drafter": "none"}))
        assert pieces[-1].choices[0].finish_reason == "tool_calls"
        first, *deltas = [delta for piece in pieces for delta in piece.choices[0].delta.tool_calls or ()]
        assert (first.index, first.type, first.function.name, first.id[:5]) == (0, "function", "f", "call_")
        assert all((delta.index, delta.id, delta.function.name) == (0, None, None) for delta in deltas)
        assert "".join(delta.function.arguments for delta in [first, *deltas]) == call.function.arguments
        assert not any(piece.choices[0].delta.content for piece in pieces)
    assert len(set(texts)) > 1


def test_a_function_that_is_named(served: Served) -> None:
    end = str(served.alone.tokenizer.encode("}", add_special_tokens=False)[0])
    for name in ("f", "now"):
        choice = {"type": "function", "function": {"name": name}}
        found = served.ask(tools=TOOLS, tool_choice=choice, max_tokens=110, logit_bias={end: 100}, seed=1)
        assert [call.function.name for call in found.choices[0].message.tool_calls or ()] == [name]
        assert found.choices[0].finish_reason == "tool_calls"


def test_several_choices_stream_their_calls_side_by_side(served: Served) -> None:
    own: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required", "n": 3, "seed": 4}
    own["parallel_tool_calls"] = False
    found: list[str] = [""] * 3
    for piece in served.ask(**own, stream=True):  # type: ignore[assignment]
        for delta in piece.choices[0].delta.tool_calls or ():  # type: ignore[attr-defined]
            found[piece.choices[0].index] += delta.function.arguments  # type: ignore[attr-defined]
    expected = [choice.message.tool_calls[0].function.arguments for choice in served.ask(**own).choices]
    assert found == expected
    assert len(set(found)) > 1


def test_an_answer_may_be_text(served: Served) -> None:
    own: dict[str, Any] = {"tools": TOOLS, "temperature": 0, "max_completion_tokens": 12}
    for choice in ({}, {"tool_choice": "auto"}):
        found = served.ask(**own, **choice).choices[0]
        assert found.message.tool_calls is None
        assert found.message.content
        ids = served.alone.tokenizer.encode("f:does it now: uhi|a", add_special_tokens=False)
        form: Any = {"regex": "(.|\n)*"}
        assert found.message.content == served.alone.generate(ids, max_new_tokens=12, structured_outputs=form).text
        pieces = served.ask(**own, **choice, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == found.message.content


def test_an_answer_may_be_a_call(served: Served) -> None:
    """Where it begins with a brace, as the bias has it."""
    served.use(LLAMA)
    brace = served.alone.tokenizer.encode("{", add_special_tokens=False)[0]
    own: dict[str, Any] = {"tools": TOOLS[:1], "logit_bias": {str(brace): 100}, "seed": 1}
    choice = served.ask(**own).choices[0]
    assert choice.finish_reason == "tool_calls"
    check_call((choice.message.tool_calls or [None])[0])
    free = served.ask(**own, tool_choice="none", max_completion_tokens=9).choices[0]
    assert free.message.tool_calls is None
    assert (free.message.content or "").startswith("{{")


def test_variables_of_a_template_are_passed_on(served: Served) -> None:
    served.use("{% if not tone is defined %}{% set tone = 'plain' %}{% endif %}{{ tone }}|" + HERMES)
    own: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    for given, tone in (({"tone": "curt"}, "curt"), ({}, "plain"), (None, "plain")):
        prompt = served.alone.tokenizer.encode(f"{tone}|uhi|a", add_special_tokens=False)
        expected = served.alone.generate(prompt, max_new_tokens=6).text
        found = served.ask(**own, extra_body={"chat_template_kwargs": given})
        assert found.choices[0].message.content == expected
    assert served.alone.generate(messages=ASK, max_new_tokens=6, chat_template_kwargs={}).text == expected
    for wrong, words in (
        ({"tune": 1}, "has 'tune', which the chat template .* does not take; it takes: tone, tools"),
        ({"messages": []}, "chat_template_kwargs has 'messages', which"),
        ({"tools": []}, "chat_template_kwargs has tools; pass tools by themselves"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            served.ask(**own, extra_body={"chat_template_kwargs": wrong})
    with pytest.raises(RequestError, match="chat_template_kwargs are given, and no messages"):
        served.alone.generate("hi", chat_template_kwargs={"tone": "curt"})  # type: ignore[call-overload]


@pytest.mark.parametrize("depth", [65, 800])
def test_deep_nesting_is_a_bad_request(served: Served, depth: int) -> None:
    served.use("{{ tone }}" + HERMES)
    deep: Any = "x"
    for _ in range(depth):
        deep = {"a": deep}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(deep)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": deep}}}
    asked: list[dict[str, Any]] = [
        {"extra_body": {"chat_template_kwargs": {"tone": deep}}},
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]},
        {"tools": [tool]},
    ]
    for own in asked:
        with pytest.raises(openai.BadRequestError, match=r"is nested in|recursion limit|properties"):
            served.ask(max_tokens=1, **own)


def test_without_tools_to_call_there_are_none(served: Served) -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []})
    found = [served.ask(temperature=0, max_completion_tokens=9, **own).choices[0].message.content for own in ways]
    assert len(set(found)) == 1


def test_a_conversation_continues_after_a_call(served: Served) -> None:
    first = served.ask(tools=TOOLS[:1], tool_choice="required", temperature=0, parallel_tool_calls=False).choices[0]
    (call,) = first.message.tool_calls or ()
    messages = [*ASK, first.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    found = served.ask(messages=messages, temperature=0, max_completion_tokens=8)
    arguments = json.dumps(json.loads(call.function.arguments))
    written = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\n'
    prompt = f"uhi|a{written}|t42={call.id}|a"
    ids = served.alone.tokenizer.encode(prompt, add_special_tokens=False)
    assert found.choices[0].message.content == served.alone.generate(ids, max_new_tokens=8).text


def test_an_answer_without_calls_has_the_form_that_is_asked_for(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "<tool_call>"}}, "required": ["a"]}
    own: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200, **form(name="x", schema=schema)}
    schema["additionalProperties"] = False
    for seed in range(4):
        choice = served.ask(**own, seed=seed).choices[0]
        for call in choice.message.tool_calls or ():
            if choice.finish_reason != "length":  # which may cut arguments
                check_call(call)
        if not choice.message.tool_calls and choice.finish_reason == "stop":
            assert json.loads(choice.message.content or "") == {"a": "<tool_call>"}
        pieces: Any = served.ask(**own, seed=seed, stream=True)
        said = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
        assert "".join(said) == (choice.message.content or "")
    brace = served.alone.tokenizer.encode("{", add_special_tokens=False)[0]
    text = served.ask(**own, logit_bias={str(brace): 100}).choices[0].message.content
    assert json.loads(text or "") == {"a": "<tool_call>"}
    served.use(LLAMA)
    with pytest.raises(openai.BadRequestError, match="nothing distinguishes a call from an object"):
        served.ask(**own)
    assert served.ask(**own, tool_choice="required").choices[0].message.tool_calls


def form(**own: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": own}}


def function(**own: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **own}}]}


def message(role: str, **own: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **own}]}


NAMED = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "x", "function": {"name": "f", "arguments": "["}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, 'tools[0].type is "web_search"; pass "function", as other tools'),
    (function(name="a b"), 'tools[0].function.name is "a b"; pass 1 to 64'),
    ({"tools": TOOLS * 2}, "tools has two functions 'f'"),
    (function(parameters={"type": "array"}), 'tools[0].function.parameters.type is "array"; pass "object"'),
    (
        function(strict=True, parameters={"not": {}}),
        "tools[0].function.parameters cannot be served: Unimplemented keys",
    ),
    ({"tool_choice": "auto"}, "tool_choice is given, and there are no tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, 'tool_choice is "any"; pass "none", "auto", "required"'),
    ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice names the function 'g'; tools has f, now"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs and tools both say what form"),
    ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos is true, and a text that is to have a form"),
    (message("tool", content="x"), "messages[0].tool_call_id is missing; pass the id of"),
    (message("user", content="x", tool_call_id="y"), "messages[0].tool_call_id is given, and its role is user"),
    (message("assistant", tool_calls=[CALL]), 'tool_calls[0].function.arguments is "["; pass JSON of an object'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing; pass it with"),
    (form(), "response_format.json_schema.name is null; pass a text"),
    (form(name="x", schemas={}), "response_format.json_schema.schemas is no known key"),
    (form(name="x", strict=True, schema={"not": {}}), "json_schema.schema cannot be served: Unimplemented keys"),
    ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex has a regular expression"),
    ({"structured_outputs": 5}, "structured_outputs must be an object with exactly one"),
]


@pytest.mark.parametrize(("own", "words"), REFUSED, ids=str)
def test_requests_that_cannot_be_served_are_refused(served: Served, own: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as caught:
        served.ask(extra_body=own)
    assert caught.value.type == "invalid_request_error"


def test_a_template_must_know_tools(served: Served) -> None:
    served.use("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(openai.BadRequestError, match="The chat template of the plan does not know tools"):
        served.ask(tools=TOOLS)
    assert served.ask(tools=TOOLS, tool_choice="none", max_tokens=2).choices[0].message.content
    served.use(TEMPLATE)
    with pytest.raises(openai.BadRequestError, match=r"in no format that is served.*name it as target.tool_parser"):
        served.ask(tools=TOOLS)


# Response formats.


class Person(BaseModel):
    kind: Literal["a", "b"]
    age: int = Field(ge=0, le=130)
    happy: bool | None


def test_an_answer_is_read_as_the_model_that_it_was_asked_for(served: Served) -> None:
    found = served.client.chat.completions.parse(model="toy", messages=ASK, response_format=Person, seed=1)
    assert isinstance(found.choices[0].message.parsed, Person)


def test_forms_of_an_answer(served: Served) -> None:
    end = served.alone.tokenizer.encode("}", add_special_tokens=False)[0]
    own: dict[str, Any] = {"response_format": {"type": "json_object"}, "logit_bias": {str(end): 100}}
    found = served.ask(**own).choices[0]
    assert (json.loads(found.message.content or ""), found.finish_reason) == ({}, "stop")
    assert served.ask(response_format={"type": "text"}, max_tokens=3).choices[0].message.content
    lenient = form(name="x", schema={"type": "boolean", "not": {}})  # an unknown key is ignored unless it is strict
    assert served.ask(**lenient).choices[0].message.content in ("true", "false")


def test_forms_as_vllm_names_them(served: Served) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert served.client.completions.create(model="toy", prompt="x", extra_body=form).choices[0].text in ("yes", "no")
    pieces: Any = served.ask(temperature=0, extra_body=form, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) in ("yes", "no")
