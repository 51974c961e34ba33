"""What goes back to a client, as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.generation import FinishReason, Generation
from runtime.sampling import TokenLogprob
from runtime.tokenizer import Tokenizer

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",  # cut off, though not by a number of tokens
    FinishReason.CANCELLED: "stop",
}


def finish_reason(generation: Generation) -> str:
    return _REASONS[generation.finish_reason]


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of all choices; `cached_tokens` were not computed again."""
    prompt = sum(each.stats.prompt_tokens for each in generations)
    new = sum(each.stats.new_tokens for each in generations)
    reused = sum(each.stats.reused_tokens for each in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            one(each.token_id, each.logprob) | {"top_logprobs": [one(*pair) for pair in each.top]} for each in entries
        ]
    }


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
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
