"""Bodies as clients send them, messages as chat templates receive them, and prompts as token ids."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from typing import Any

import pytest
import tokenizers
from pydantic import ValidationError

from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import RequestError
from outrider.plans.manifest import Geometry
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.options.options import check_options
from outrider.runtime.request_queue import check_place_in_queue
from outrider.runtime.server.generation_request import ChatRequest
from outrider.runtime.text.prompt import choose_prompt, prepare_prompt
from tests import tokenizer_families as families

HI = [{"role": "user", "content": "hi"}]


def chat(**own: Any) -> ChatRequest:
    asked = ChatRequest.model_validate({"model": "toy", "messages": HI, **own})
    asked.check()
    return asked


@pytest.mark.parametrize("key", sorted({*ChatRequest.model_fields} - {"messages", "model"}))
def test_null_is_left_out(key: str) -> None:
    assert chat(**{key: None}) == chat()


@pytest.mark.parametrize(
    "own",
    [
        {"prompt_cache_key": "k", "safety_identifier": "u", "service_tier": "auto", "reasoning_effort": "low"},
        {"prediction": {"type": "content", "content": "hi"}, "modalities": ["text"], "a_key_of_next_year": None},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
        {"messages": [*HI, {"role": "assistant", "content": "a", "annotations": [], "parsed": {}, "audio": None}]},
        {"messages": [*HI, {"role": "assistant", "content": "a", "reasoning": "b", "tool_calls": []}]},
    ],
    ids=str,
)
def test_unused_keys_of_clients_are_accepted(own: dict[str, Any]) -> None:
    chat(**own)


@pytest.mark.parametrize("own", [{"modalities": ["audio"]}, {"functions": []}, {"messages": [{**HI[0], "audio": {}}]}])
def test_keys_that_would_change_an_answer_are_not_ignored(own: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"Extra inputs|should be"):
        chat(**own)


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }} {{ m.name }} {{ m.reasoning_content }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}]"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ({"role": "user", "name": "Ada", "content": "a"}, "[user Ada  a]"),
        ({"role": "developer", "content": "a"}, "[system   a]"),
        ({"role": "assistant", "content": "a", "reasoning_content": "r"}, "[assistant  r a]"),
        ({"role": "assistant", "content": "a", "reasoning": "r", "refusal": None}, "[assistant  r a]"),
        ({"role": "tool", "tool_call_id": "c", "content": "7"}, "[tool   7]"),
        ({"role": "assistant", "content": "a", "tool_calls": [call("")]}, "[assistant   a f:{}]"),
        ({"role": "assistant", "content": "a", "tool_calls": [call('{"a": [1]}')]}, '[assistant   a f:{"a": [1]}]'),
    ],
    ids=str,
)
def test_a_message_is_the_same_from_the_server_and_the_library(message: dict[str, Any], printed: str) -> None:
    template = ChatTemplate(TEMPLATE, source="the test's")
    of_server = [each.plain() for each in chat(messages=[message]).messages]
    assert template.render(of_server, False, {}) == template.render([message], False, {}) == printed


def test_a_tools_result_in_parts_is_its_text() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}] * 2}
    assert chat(messages=[message]).messages[0].plain()["content"] == "77"


def test_a_template_that_names_the_developer_gets_its_messages() -> None:
    template = ChatTemplate(TEMPLATE + "{# developer #}", source="the test's")
    assert template.render([{"role": "developer", "content": "a"}], False, {}) == "[developer   a]"


NUMBERS = [key for key, field in ChatRequest.model_fields.items() if "number" in (field.description or "")]
HUGE = {"400 digits": -(10**400), "5000 digits": 10**5000, "inf": inf, "nan": nan}


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", [*NUMBERS, "logit_bias"])
def test_numbers_that_no_float_holds_raise_no_other_error(key: str, value: str) -> None:
    given: Any = {"5": HUGE[value]} if key == "logit_bias" else HUGE[value]
    with suppress(ValidationError, RequestError):
        for options in chat(**{key: given}).options(None, None):
            check_options(options, 9)
    with suppress(RequestError):
        check_place_in_queue(0, given)


OPENING = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if mood %}{{ mood }}{% endif %}{% endfor %}"


def made(library: tokenizers.Tokenizer, bos: str = "<bos>") -> tuple[Tokenizer, Geometry]:
    template = ChatTemplate(OPENING, source="t", special_tokens={"bos_token": bos})
    tokenizer = Tokenizer(library, template)
    return tokenizer, Geometry.model_construct(context=100, vocab_size=tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("make", "bos"), [(families.gemma, "<bos>"), (families.llama, "<s>"), (families.tekken, "<s>")]
)
def test_what_opens_a_sequence_begins_with_one_beginning(make: Callable[[], tokenizers.Tokenizer], bos: str) -> None:
    """A text gets it of the tokenizer, a conversation of its template, what continues none, and ids are as they are."""
    tokenizer, geometry = made(make(), bos)
    first = tokenizer.token_id(bos)
    assert first is not None

    def ids(prompt: str | list[int], present: list[int]) -> list[int]:
        return prepare_prompt(prompt, present, (), tokenizer, geometry).ids

    opened = ids("the end", [])
    assert opened == [first, *tokenizer.encode("the end", add_special_tokens=False)]
    assert ids(" the end", opened)[:1] != [first]
    assert ids(opened, []) == opened
    chat = choose_prompt(None, [{"role": "user", "content": "the end"}], tokenizer, geometry)
    assert not isinstance(chat, str)
    assert ids(list(chat), []) == opened


def test_a_chat_template_is_given_what_it_reads_and_nothing_else() -> None:
    tokenizer, geometry = made(families.gemma())
    messages = [{"role": "user", "content": "the"}]

    def text(**variables: object) -> str:
        ids = choose_prompt(None, messages, tokenizer, geometry, variables)
        assert not isinstance(ids, str)
        return tokenizer.decode(ids)

    assert (text(), text(mood=" end")) == ("the", "the end")
    for name in ("mode", "messages", "add_generation_prompt", "bos_token"):  # special tokens are the plan's
        with pytest.raises(RequestError, match=f"chat_template_kwargs has '{name}', which .* it takes: mood"):
            text(**{name: 1})
    with pytest.raises(RequestError, match="chat_template_kwargs are given, and no messages"):
        choose_prompt("the", None, tokenizer, geometry, {"mood": 1})
    with pytest.raises(RequestError, match="chat_template_kwargs must be a mapping of names, not list"):
        choose_prompt(None, messages, tokenizer, geometry, ["mood"])  # type: ignore[arg-type]
