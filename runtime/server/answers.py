"""Answers to a client, as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import Drafter
from outrider.runtime.generation import FinishReason, Generation, Span
from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.server.served import ServedRuntime
from outrider.runtime.server.stamps import FreshStamps, Stamps
from outrider.runtime.server.submitting import Submission
from outrider.runtime.server.tool_calling import CallReader, Read, ToolCalling, joined
from outrider.runtime.stats import Stats
from outrider.runtime.text.token_texts import TokenTexts

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",  # cut off, though not by a number of tokens
    FinishReason.CANCELLED: "length",  # cut off by the server's end; nobody reads an answer that its client cancelled
}


def _usage(found: Sequence[Generation], prompts: int, costs: bool) -> dict[str, Any]:
    """Tokens of all choices; prompts count once. With `costs`, those that were not computed: that depends on others."""
    once = found[:: len(found) // prompts]
    prompt, new = sum(each.stats.prompt_tokens for each in once), sum(len(each.token_ids) for each in found)
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    cached = {"cached_tokens": sum(each.stats.reused_tokens for each in once)}
    return usage | ({"prompt_tokens_details": cached} if costs else {})


def _chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.name(token_id), "logprob": logprob, "bytes": list(texts.bytes_of(token_id))}

    content = []
    for each in entries:
        content.append(one(each.token_id, each.logprob) | {"top_logprobs": [one(*pair) for pair in each.top]})
        texts.push(each.token_id)
    return {"content": content}


def _completion_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a completion's choice. Of tokens with one name (a byte and its letter) the likelier counts."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in entries:
        found["tokens"].append(texts.name(each.token_id))
        found["token_logprobs"].append(each.logprob)
        found["top_logprobs"].append({texts.name(token): value for token, value in reversed(each.top)})
        found["text_offset"].append(texts.length)
        texts.push(each.token_id)
    return found


def _delta(read: Read) -> dict[str, Any]:
    """What a piece of text said, as the `delta` of a chunk."""
    content = {"content": read.content} if read.content else {}
    return content | ({"tool_calls": list(read.calls.values())} if read.calls else {})


class Answer:
    """One answer's objects: what they have in common, and how choices look.

    Without `costs` they say nothing that depends on what ran before or beside the request.
    """

    def __init__(
        self, model: str, runtime: ServedRuntime, *, chat: bool, stamps: Stamps | None = None, costs: bool = True
    ) -> None:
        self._tokenizer, self._chat, self._costs = runtime.tokenizer, chat, costs
        self._texts: dict[int, TokenTexts] = {}  # by choice, where log-probabilities are asked for
        self._stamps = stamps or FreshStamps()
        self._drafters = runtime.manifest.drafters
        self.drafter: str | None = None  # that the request asks for; None: the plan's first
        self.calling: ToolCalling | None = None  # the tools that may be called
        self._contexts: Sequence[Sequence[int]] = ()  # token ids that each choice continues
        self.with_usage = False  # of a stream: its last object has the usage, and the others say that they have none
        self._readers: dict[int, CallReader] = {}  # by choice
        self._whole = "chat.completion" if chat else "text_completion"
        self._chunk = "chat.completion.chunk" if chat else self._whole
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self._stamps.token()}",
            "created": self._stamps.created,
            "model": model,
            "system_fingerprint": runtime.manifest.identity[:12],
        }

    def describe(self, submitted: Submission, drafter: str | None) -> None:
        """Say what is answered, with a request's drafter: before anything of the answer."""
        self.calling, self.drafter, self._contexts = submitted.calling, drafter, submitted.contexts
        self._common["seed"] = submitted.seed

    @property
    def id(self) -> str:
        return str(self._common["id"])

    @property
    def drafter_name(self) -> str:
        """The drafter that drafts for it, or none."""
        return self.drafter or next((each.name for each in self._drafters), "none")

    def whole(self, found: Sequence[Generation], prompts: int, logprobs: bool) -> dict[str, Any]:
        choices = []
        for index, each in enumerate(found):
            choice: dict[str, Any] = {"index": index, "logprobs": None}
            if self._chat:
                choice["message"] = self._message(index, each)
            else:
                choice["text"] = each.text
            choice["finish_reason"] = self._reason(index, each)
            if logprobs:
                choice["logprobs"] = self._logprobs(index, each.logprobs)
            choices.append(choice)
        return {**self._common, "object": self._whole, "choices": choices, **self._counts(found, prompts)}

    def _message(self, index: int, found: Generation) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": found.text, "refusal": None}
        if (reader := self._reader(index)) is not None:
            read = joined([reader.push(found.text), reader.finish()])
            message["content"] = read.content or None if read.calls else read.content
            if read.calls:
                message["tool_calls"] = list(read.calls.values())
        return message

    def _reader(self, index: int) -> CallReader | None:
        """The reader of a choice's calls."""
        if self.calling is None:
            return None
        return self._readers.setdefault(index, self.calling.reader(self._stamps))

    def _reason(self, index: int, found: Generation) -> str:
        reader = self._reader(index)
        called = reader is not None and reader.whole and found.finish_reason is FinishReason.STOP
        return "tool_calls" if called else _REASONS[found.finish_reason]

    def opening(self, index: int) -> dict[str, Any] | None:
        """The object that comes before a choice's first text."""
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}}, None) if self._chat else None

    def piece(self, index: int, span: Span, logprobs: bool) -> dict[str, Any] | None:
        """The object of a span; None where its text is held back, as it may begin a call."""
        own: dict[str, Any] = {"delta": {"content": span.text}} if self._chat else {"text": span.text}
        if (reader := self._reader(index)) is not None:
            own = {"delta": _delta(reader.push(span.text))}
            if not own["delta"] and not logprobs:
                return None
        if logprobs:
            own["logprobs"] = self._logprobs(index, span.logprobs)
        return self._piece(index, own, None)

    def ending(self, index: int, found: Generation) -> Iterator[dict[str, Any]]:
        """The last objects of a choice: of text that was held back, if any, and of the reason why it ends."""
        if (reader := self._reader(index)) is not None and (delta := _delta(reader.finish())):
            yield self._piece(index, {"delta": delta}, None)
        yield self._piece(index, {"delta": {}} if self._chat else {"text": ""}, self._reason(index, found))

    def usage(self, found: Sequence[Generation], prompts: int) -> dict[str, Any]:
        return {**self._common, "object": self._chunk, "choices": [], **self._counts(found, prompts)}

    def _counts(self, found: Sequence[Generation], prompts: int) -> dict[str, Any]:
        """`usage`, and `metrics` where something was drafted."""
        usage = {"usage": _usage(found, prompts, self._costs)}
        if not self._costs:
            return usage
        drafts = speculation([each.stats for each in found], longest_path(self._drafters, self.drafter))
        return usage if drafts is None else usage | {"metrics": {"speculative_decoding": drafts}}

    def _piece(self, index: int, own: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": reason, "logprobs": None, **own}
        usage = {"usage": None} if self.with_usage else {}
        return {**self._common, "object": self._chunk, "choices": [choice], **usage}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if index not in self._texts:
            self._texts[index] = TokenTexts(self._tokenizer, self._contexts[index])
        return (_chat_logprobs if self._chat else _completion_logprobs)(self._texts[index], entries)


def longest_path(drafters: Sequence[Drafter], asked: str | None) -> int:
    """Most tokens that lie one after another in a draft of the drafter `asked` for, None being the plan's first.

    0 where none drafts. Of n-grams with a drafter after them, the longer of the two.
    """
    chosen = next((each for each in drafters if not asked or each.name == asked), None)
    if chosen is None:
        return 0
    if not isinstance(chosen, HostDrafter):
        return chosen.longest_path
    return max(chosen.max_draft, 0 if chosen.otherwise is None else longest_path(drafters, chosen.otherwise))


def speculation(found: Sequence[Stats], longest: int) -> dict[str, Any] | None:
    """The object of an answer whose choices have the statistics `found`, added up; None where nothing was drafted.

    `longest` is the longest path of a draft, 0 where no drafter was asked for. A round that confirms what partial KV
    ran ahead with may accept more: the histogram, whose index is the number of accepted tokens, and `num_spec_tokens`
    go as far.
    """
    histogram = [sum(rounds) for rounds in zip_longest(*(each.rounds_by_accepted for each in found), fillvalue=0)]
    steps = sum(histogram)
    if not steps or not longest:
        return None
    histogram += [0] * (longest + 1 - len(histogram))
    accepted, drafted = sum(each.accepted for each in found), sum(each.drafted for each in found)
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }
