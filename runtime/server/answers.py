"""Answers to a client, as OpenAI's objects."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from time import time
from typing import Any

from plans.tokenizer import Tokenizer
from runtime.generation import FinishReason, Generation, Span
from runtime.runtime import Runtime
from runtime.sampling import TokenLogprob

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",  # cut off, though not by a number of tokens
    FinishReason.CANCELLED: "length",  # cut off by the server's end; nobody reads an answer that its client cancelled
}


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """As OpenAI's. Half a character, which a message may repeat of what was sent, is written as its escape."""
    told = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return {"error": {"message": told, "type": kind, "param": None, "code": code}}


def _usage(found: Sequence[Generation], prompts: int) -> dict[str, Any]:
    """Tokens of all choices; prompts count once, however many choices they have. `cached_tokens` were not computed."""
    once = found[:: len(found) // prompts]
    prompt, new = sum(each.stats.prompt_tokens for each in once), sum(each.stats.new_tokens for each in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.stats.reused_tokens for each in once)},
    }


def _chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            one(each.token_id, each.logprob) | {"top_logprobs": [one(*pair) for pair in each.top]} for each in entries
        ]
    }


def _completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """`logprobs` of a completion's choice, whose text begins at `offset`."""
    tokens = [tokenizer.decode([each.token_id]) for each in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in entries],
        "top_logprobs": [{tokenizer.decode([token]): value for token, value in each.top} for each in entries],
        "text_offset": offsets,
    }


class Answer:
    """One answer's objects: what they have in common, and how choices look."""

    def __init__(self, prefix: str, whole: str, chunk: str, model: str, runtime: Runtime, *, chat: bool) -> None:
        self._tokenizer, self._chat = runtime.tokenizer, chat
        self._whole, self._chunk = whole, chunk
        self._common = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time()),
            "model": model,
            "system_fingerprint": runtime.manifest.identity[:12],
        }

    def whole(self, found: Sequence[Generation], prompts: int, logprobs: bool) -> dict[str, Any]:
        choices = []
        for index, each in enumerate(found):
            choice: dict[str, Any] = {"index": index, "finish_reason": _REASONS[each.finish_reason], "logprobs": None}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": each.text, "refusal": None}
            else:
                choice["text"] = each.text
            if logprobs:
                choice["logprobs"] = self._logprobs(each.logprobs, 0)
            choices.append(choice)
        return {**self._common, "object": self._whole, "choices": choices, "usage": _usage(found, prompts)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The object that comes before a choice's first text."""
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}}, None) if self._chat else None

    def piece(self, index: int, span: Span, offset: int, logprobs: bool) -> dict[str, Any]:
        own: dict[str, Any] = {"delta": {"content": span.text}} if self._chat else {"text": span.text}
        if logprobs:
            own["logprobs"] = self._logprobs(span.logprobs, offset)
        return self._piece(index, own, None)

    def ending(self, index: int, found: Generation) -> dict[str, Any]:
        return self._piece(index, {"delta": {}} if self._chat else {"text": ""}, _REASONS[found.finish_reason])

    def usage(self, found: Sequence[Generation], prompts: int) -> dict[str, Any]:
        return {**self._common, "object": self._chunk, "choices": [], "usage": _usage(found, prompts)}

    def _piece(self, index: int, own: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": reason, "logprobs": None, **own}
        return {**self._common, "object": self._chunk, "choices": [choice]}

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        if self._chat:
            return _chat_logprobs(self._tokenizer, entries)
        return _completion_logprobs(self._tokenizer, entries, offset)
