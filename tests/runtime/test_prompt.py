"""Prompts as token ids: what a tokenizer puts before a text, and what a chat template reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers

from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import RequestError
from outrider.plans.manifest import Geometry
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.prompt import choose_prompt, prepare_prompt
from tests import tokenizer_families as families

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if mood %}{{ mood }}{% endif %}{% endfor %}"


def made(library: tokenizers.Tokenizer, bos: str = "<bos>") -> tuple[Tokenizer, Geometry]:
    template = ChatTemplate(TEMPLATE, source="t", special_tokens={"bos_token": bos})
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
