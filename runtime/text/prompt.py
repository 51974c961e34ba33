"""Prompts: checked, encoded and ready to continue a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.plans.errors import RequestError
from outrider.plans.manifest import Geometry
from outrider.plans.text_check import check_text
from outrider.plans.tokenizer import Tokenizer, as_ids
from outrider.runtime.numbers import shown
from outrider.runtime.text.stream import CONTEXT_TOKENS, TextStream

Messages = Sequence[Mapping[str, object]]
"""A conversation: mappings of `role` and `content`, and what else the plan's chat template knows."""
TemplateVariables = Mapping[str, object]
"""Values of further names that the plan's chat template reads, such as `tools`, `documents` or `enable_thinking`."""


@dataclass(frozen=True)
class Prompt:
    """Token ids to append, and the text stream that will read what is generated after them."""

    ids: list[int]
    text: TextStream


def is_one_prompt(prompt: object) -> bool:
    """Whether it is one prompt: a text, or token ids, and no list of such."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not len(prompt):
        return True
    return isinstance(prompt[0], int | np.integer)


def choose_prompt(
    prompt: str | Sequence[int] | None,
    messages: Messages | None,
    tokenizer: Tokenizer,
    geometry: Geometry,
    variables: TemplateVariables | None = None,
) -> str | Sequence[int]:
    """Return the prompt that was passed: `prompt`, or `messages` through the plan's chat template, which may read
    `variables`.

    Raises RequestError for both or none, for messages that are no conversation or do not fit the context, for variables
    without messages or that the template does not read, and where the plan has no template.
    """
    if variables and messages is None:
        raise RequestError("chat_template_kwargs are given, and no messages; pass messages, or leave them out.")
    if prompt is not None and messages is None:
        return prompt
    if messages is not None and prompt is None:
        return chat_prompt(messages, tokenizer, geometry, variables)
    given = "neither was given" if prompt is None else "both were given"
    raise RequestError(f"Pass a prompt, as text or token ids, or messages: exactly one of the two; {given}.")


def prepare_prompt(
    prompt: str | Sequence[int],
    present: Sequence[int],
    stop: Sequence[str],
    tokenizer: Tokenizer,
    geometry: Geometry,
    *,
    generated: Sequence[int] = (),
    min_tokens: int = 0,
) -> Prompt:
    """Encode `prompt` after the tokens `present` and check that the two can be served, and continued with.

    Only the text that opens a sequence gets the special tokens a tokenizer adds (such as Llama's first). Its request
    has given the tokens `generated` after the prompt before; a stop string among them counts from `min_tokens` on.
    Raises RequestError naming what is wrong and the limits.
    """
    if isinstance(prompt, str):
        opening = not present
        ids = encode_prompt(prompt, tokenizer, geometry, len(present), add_special_tokens=opening) if prompt else []
    else:
        ids = as_ids(prompt)
    wrong = next((i for i in ids if not 0 <= i < geometry.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"Token id {shown(wrong)} is not in the vocabulary; ids go from 0 to {geometry.vocab_size - 1}."
        )
    total = len(present) + len(ids)
    if total == 0:
        raise RequestError("The prompt is empty; there is nothing to continue. Pass text or token ids.")
    if total >= geometry.context:
        raise _too_long(str(total), geometry)
    context = [*present[-CONTEXT_TOKENS:], *ids]
    if generated:
        _check_generated(generated, total, TextStream(tokenizer, context, stop), min_tokens, geometry)
    return Prompt(ids, TextStream(tokenizer, context, stop))


def _check_generated(given: Sequence[int], prompt: int, text: TextStream, least: int, geometry: Geometry) -> None:
    """Raise RequestError for tokens after which nothing follows."""
    if prompt + len(given) >= geometry.context:
        raise RequestError(
            f"generated holds {len(given)} tokens after {prompt}, which fill the plan's context of "
            f"{geometry.context}; the request is over."
        )
    text.least = least
    if text.push(list(given)).stop is not None:
        raise RequestError(f"generated holds the stop string {text.stopped!r}; the request is over.")


def encode_prompt(
    text: str, tokenizer: Tokenizer, geometry: Geometry, present: int = 0, *, add_special_tokens: bool = False
) -> list[int]:
    """Encode `text`, which follows `present` tokens.

    A text whose bytes alone show that it cannot fit the context is refused before it is encoded, which takes seconds
    for megabytes. No text that fits is. Raises RequestError.
    """
    check_text(text, "The prompt")
    least = present + tokenizer.least_tokens(text)
    if least >= geometry.context:
        raise _too_long(f"at least {least}", geometry)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def chat_prompt(
    messages: Messages, tokenizer: Tokenizer, geometry: Geometry, variables: TemplateVariables | None = None
) -> list[int]:
    """Encode a conversation through the plan's chat template, which may read further `variables`.

    Nothing is put around what the template writes. Raises RequestError as `encode_prompt` does, and for variables that
    the template does not read.
    """
    # A template may take a time that grows with their square.
    if isinstance(messages, Sequence) and len(messages) >= geometry.context:
        raise RequestError(
            f"The conversation has {len(messages)} messages, each of a token or more; the plan's context is "
            f"{geometry.context}. Leave messages out."
        )
    _check_variables(variables or {}, tokenizer)
    return encode_prompt(tokenizer.apply_chat_template(messages, variables=variables), tokenizer, geometry)


_OWN = ("messages", "add_generation_prompt")


def _check_variables(variables: TemplateVariables, tokenizer: Tokenizer) -> None:
    """Raise RequestError for a variable without effect."""
    if not isinstance(variables, Mapping):
        raise RequestError(f"chat_template_kwargs must be a mapping of names, not {type(variables).__name__}.")
    if not variables:
        return
    template = tokenizer.check_chat(tools=variables.get("tools") is not None)
    own = {*_OWN, *template.special_names}
    wrong = next((name for name in variables if name in own or name not in template.names), None)
    if wrong is not None:
        names = ", ".join(sorted(template.names - own)) or "none"
        raise RequestError(
            f"chat_template_kwargs has {wrong!r}, which the chat template of the plan does not take; it takes: {names}."
        )


def _too_long(tokens: str, geometry: Geometry) -> RequestError:
    return RequestError(
        f"The sequence would have {tokens} tokens before any is generated; the plan's context is "
        f"{geometry.context}. Shorten the prompt, or build the plan with a larger capacity.context."
    )
