"""Options of a generation, checked once and then only read."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import islice
from typing import Literal

from outrider.plans.errors import RequestError
from outrider.plans.manifest import Manifest, rejects
from outrider.plans.partial_kv import PARTIAL_MODES, PartialKv, PartialMode
from outrider.plans.text_check import check_text
from outrider.runtime.draft_options import DraftLimits, DraftOptions, check_draft_limits
from outrider.runtime.logits_options import LogitsOptions, check_min_tokens, check_rules
from outrider.runtime.numbers import shown
from outrider.runtime.sampling import FilterOrder, SamplingParams, new_seed
from outrider.runtime.text.grammars import Grammars
from outrider.runtime.text.rules import LogitsRule
from outrider.runtime.trace import Watcher

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_BYTES = 1000
MAX_SALT = 256


class Options(LogitsOptions, DraftOptions, total=False):
    """Keyword arguments of `generate` and `stream`, in every place that has them; those of `LogitsOptions` and
    `DraftOptions` too.

    - `max_new_tokens` (128): most tokens to generate; the context's end comes first where it is nearer.
    - `temperature` (0, greedy), `top_k` (0, off), `top_p` (1, off), `min_p` (0, off), `seed` (None: a new one for
      each call, which the result has), `stream_id` (0), `filter_order`: see `sampling.SamplingParams`; `stream_id` is
      its `stream`.
    - `stop`: texts that end the generation, at most 16 of at most 1,000 bytes; they are not part of its text. The
      spelling of a special token, which prints nothing, makes it an end token.
    - `eos_token_ids`: end tokens of the vocabulary, in place of the plan's; `ignore_eos` (False): go on past them.
    - `drafter`: name of a drafter of the plan, "none" for plain decoding; default: the plan's first. Of a drafter
      by rejection, tokens depend on what was drafted too, and so on what the session has seen.
    - `skip_sample_adjustment` (False): for debugging drafters with `acceptance: rejection`; see `SamplingParams`.
    - `auto_disable` (True): decode plainly while drafts cost more than they bring, by the clock, run ahead of the full
      KV cache (`partial_kv`) only while that pays, and verify no more of a draft than is worth its price, where the
      plan has prices (`outrider tune PLAN --prices`). Tokens stay the same; drafters with `acceptance: rejection`,
      and lossy partial KV, whose tokens would not, are never disabled.
    - `on_round`: called with a `trace.Round` after each round, before its span is given out; what it raises ends the
      request, as the cause of a `RequestError`.
    - `logprobs` (None): report each token's log-probability and this many of the most probable (0 to 20).
    - `cancel`: a `threading.Event`; once set, the generation ends before its next step.
    - `partial_kv`: behind long contexts, where the plan has a partial KV cache: "lossless", whose tokens are those of
      "off"; "lossy", whose tokens are not; default: the plan's.
    - `partial_budget`: blocks of 16 tokens, or as many as the plan says, that the partial cache retrieves; "auto": as
      many as context, room and, in lossless mode, agreement make sensible; default: the plan's. Where layers of the
      model see the last tokens alone, at least as many as these take.
    - `tentative` (False): give out spans of tokens that are not confirmed yet, marked, in lossless mode. Their text is
      what is still to be shown if all that waits is confirmed and nothing follows.
    - `remember` (True): once the generation has ended by itself, keep its tokens for later drafts of other requests,
      if its drafter has a memory (`memory` of the recipe). Requests of equal `cache_salt` share the memory: the
      speed of a request's tokens can reveal outputs of others.
    - `cache_salt` (""): as in vLLM: the prefix cache and drafters' memories are shared only among requests of equal
      salt, so that response times and `cached_tokens` reveal nothing about other requests.
    - `generated` (none): tokens that the same request has given before, elsewhere or before a restart. It goes on
      behind them with the tokens and the text that it would have had, `max_new_tokens` and rules counting them; its
      spans, and the log-probabilities of its result, are those of tokens to come. Not with drafters by rejection or
      lossy partial KV, whose tokens depend on where rounds end.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stream_id: int
    filter_order: FilterOrder
    stop: Sequence[str]
    eos_token_ids: Sequence[int]
    ignore_eos: bool
    drafter: str
    skip_sample_adjustment: bool
    auto_disable: bool
    on_round: Watcher | None
    logprobs: int | None
    cancel: threading.Event | None
    partial_kv: PartialMode
    partial_budget: int | Literal["auto"] | None
    tentative: bool
    remember: bool
    cache_salt: str
    generated: Sequence[int]


@dataclass(frozen=True)
class Request:
    """Checked options. `drafter` is None for plain decoding; `rules` are applied in their order."""

    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    eos_token_ids: frozenset[int]
    drafter: str | None
    auto_disable: bool
    on_round: Watcher | None
    logprobs: int | None
    cancel: threading.Event | None
    rules: tuple[LogitsRule, ...] = ()
    min_tokens: int = 0
    limits: DraftLimits = field(default_factory=DraftLimits)
    partial_kv: PartialMode = "off"
    partial_budget: int | Literal["auto"] | None = None
    tentative: bool = False
    remember: bool = True
    cache_salt: str = ""
    generated: tuple[int, ...] = ()

    @property
    def cancelled(self) -> bool:
        """Whether the caller has cancelled it."""
        return self.cancel is not None and self.cancel.is_set()


def check_options(
    options: Options,
    drafters: Sequence[str],
    eos_token_ids: Sequence[int],
    partial: PartialKv | None = None,
    vocab_size: int | None = None,
    grammars: Grammars | None = None,
    *,
    rejecting: Collection[str] = (),
    shared: bool = False,
    window: int = 0,
) -> Request:
    """Turn keyword arguments into a `Request`; raises RequestError naming the option and its limits.

    Without `vocab_size`, tokens that the caller names may be any numbers; without `grammars`, there are neither
    `bad_words` nor `structured_outputs`. Drafters that are `rejecting` are accepted by rejection. `shared`: others are
    to stand in the same row of the KV cache. Layers of the target with a window see no more than `window` tokens.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        names = sorted(Options.__annotations__)
        meant = "".join(f" (did you mean {each!r}?)" for each in get_close_matches(unknown[0], names, 1))
        raise RequestError(f"Unknown option {unknown[0]!r}{meant}; the options are {', '.join(names)}.")
    max_new_tokens = options.get("max_new_tokens", 128)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {shown(max_new_tokens)}; pass a whole number of at least 1.")
    logprobs = options.get("logprobs")
    whole = isinstance(logprobs, int) and not isinstance(logprobs, bool)
    if logprobs is not None and not (whole and 0 <= logprobs <= MAX_LOGPROBS):
        raise RequestError(f"logprobs is {shown(logprobs)}; pass a whole number from 0 to {MAX_LOGPROBS}.")
    drafter = options.get("drafter") or (drafters[0] if drafters else "none")
    if drafter != "none" and drafter not in drafters:
        raise RequestError(f"The plan has no drafter {shown(drafter)}; it has {', '.join([*drafters, 'none'])}.")
    stop = check_stops(options.get("stop", ()))
    spelled = _special_stops(stop, grammars)
    ends: Collection[int] = options.get("eos_token_ids", eos_token_ids)
    if not isinstance(ends, Collection) or any(type(end) is not int for end in ends):
        raise RequestError(f"eos_token_ids is {shown(ends)}; pass a list of token ids.")
    if vocab_size is not None and (wrong := [end for end in ends if not 0 <= end < vocab_size]):
        raise RequestError(
            f"eos_token_ids holds {shown(wrong[0])}, which is not in the vocabulary; ids go from 0 to {vocab_size - 1}."
        )
    ends = {*ends, *spelled}
    on_round = options.get("on_round")
    if on_round is not None and not callable(on_round):
        raise RequestError(f"on_round is of type {type(on_round).__name__}; pass a function of one `Round`.")
    cancel = options.get("cancel")
    if cancel is not None and not isinstance(cancel, threading.Event):
        raise RequestError(f"cancel is of type {type(cancel).__name__}; pass a threading.Event, and set it to cancel.")
    if options.get("ignore_eos") and options.get("structured_outputs") is not None:
        raise RequestError(
            "ignore_eos is true, and a text that is to have a form ends with an end token; leave ignore_eos out."
        )
    rules = check_rules(options, max_new_tokens=max_new_tokens, ends=ends, vocab_size=vocab_size, grammars=grammars)
    mode = options.get("partial_kv")
    if mode is not None and mode not in PARTIAL_MODES:
        raise RequestError(f"partial_kv is {shown(mode)}; pass one of {', '.join(PARTIAL_MODES)}.")
    if partial is None and mode not in (None, "off"):
        raise RequestError(
            f"partial_kv is {mode!r}, and the plan has no partial KV cache; build it with partial_kv.enabled."
        )
    budget, most = options.get("partial_budget"), 1 if partial is None else partial.n_retrieval_blocks
    if partial is None and (budget is not None or options.get("tentative")):
        name = "tentative" if budget is None else "partial_budget"
        raise RequestError(f"{name} is given, and the plan has no partial KV cache; build it with partial_kv.enabled.")
    asked = mode not in (None, "off")
    if asked and rules:
        raise RequestError(
            f"partial_kv is {mode!r}, and {next(iter(rules))} goes with full KV alone; leave one of them out."
        )
    if asked and drafter in rejecting:
        raise RequestError(
            f"partial_kv is {mode!r}, and tokens of the drafter {drafter!r}, which is accepted by rejection, depend on "
            "where they are verified; ask for another drafter, or leave partial_kv out."
        )
    if asked and shared:
        raise RequestError(
            f"partial_kv is {mode!r}, and sequences that share a row of the KV cache read all of it; ask for mode "
            "batching, of a plan with capacity.batching, or leave partial_kv out."
        )
    least = 1 if partial is None else partial.least_budget(window)
    counted = isinstance(budget, int) and not isinstance(budget, bool) and least <= budget <= most
    if budget not in (None, "auto") and not counted:
        why = "" if least == 1 else f": layers of the model see the last {window} tokens, which {least} blocks reach"
        raise RequestError(f"partial_budget is {shown(budget)}; pass auto, or {least} to {most} blocks{why}.")
    if partial is None or rules or drafter in rejecting or shared:
        mode = "off"
    if partial is not None and budget is None:
        budget = partial.budget
    mode = mode or ("off" if partial is None else partial.mode)
    generated = _check_generated(options.get("generated", ()), max_new_tokens, vocab_size)
    if generated and (drafter in rejecting or mode == "lossy"):
        who = f"the drafter {drafter!r}, which is accepted by rejection" if drafter in rejecting else "lossy partial KV"
        raise RequestError(
            f"generated holds tokens, and those of {who} depend on where rounds end; begin the request again without."
        )
    if generated and options.get("seed") is None and options.get("temperature", 0.0):
        raise RequestError("generated holds tokens that were drawn, and there is no seed; pass that of their draws.")
    ending = spelled if options.get("ignore_eos", False) else frozenset(ends)
    if not ending.isdisjoint(generated):
        raise RequestError("generated holds an end token, behind which nothing follows; the request is over.")
    return Request(
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(
            temperature=options.get("temperature", 0.0),
            top_k=options.get("top_k", 0),
            top_p=options.get("top_p", 1.0),
            min_p=options.get("min_p", 0.0),
            seed=new_seed() if (seed := options.get("seed")) is None else seed,
            stream=options.get("stream_id", 0),
            filter_order=options.get("filter_order", "temperature_first"),
            skip_sample_adjustment=bool(options.get("skip_sample_adjustment", False)),
        ),
        stop=stop,
        eos_token_ids=ending,
        drafter=None if drafter == "none" else drafter,
        auto_disable=bool(options.get("auto_disable", True)),
        on_round=on_round,
        logprobs=logprobs,
        cancel=cancel,
        rules=tuple(rule for of_option in rules.values() for rule in of_option),
        min_tokens=check_min_tokens(options, max_new_tokens),
        partial_kv=mode,
        partial_budget=budget,
        tentative=bool(options.get("tentative", False)),
        remember=bool(options.get("remember", True)),
        cache_salt=_check_salt(options.get("cache_salt", "")),
        generated=generated,
    )


def check_request(options: Options, manifest: Manifest, grammars: Grammars, *, shared: bool = False) -> Request:
    """Check options against all that a plan has. Raises RequestError."""
    request = check_options(
        options,
        [drafter.name for drafter in manifest.drafters],
        manifest.text.eos_token_ids,
        manifest.partial_kv,
        manifest.target.vocab_size,
        grammars,
        rejecting=[drafter.name for drafter in manifest.drafters if rejects([drafter])],
        shared=shared,
        window=manifest.target.widest_window,
    )
    limits = check_draft_limits(options, request.drafter, manifest.drafters)
    return request if limits == request.limits else replace(request, limits=limits)


def _check_generated(given: object, max_new_tokens: int, vocab_size: int | None) -> tuple[int, ...]:
    if (
        not isinstance(given, Sequence)
        or isinstance(given, str | bytes)
        or any(type(each) is not int for each in given)
    ):
        raise RequestError(f"generated is of type {type(given).__name__}; pass a list of token ids.")
    if vocab_size is not None and (wrong := [each for each in given if not 0 <= each < vocab_size]):
        raise RequestError(
            f"generated holds {shown(wrong[0])}, which is not in the vocabulary; ids go from 0 to {vocab_size - 1}."
        )
    if given and len(given) >= max_new_tokens:
        raise RequestError(
            f"generated holds {len(given)} tokens, and max_new_tokens is {max_new_tokens}; the request is over."
        )
    return tuple(given)


def _check_salt(salt: object) -> str:
    if not isinstance(salt, str) or len(salt) > MAX_SALT:
        raise RequestError(f"cache_salt is {shown(salt)}; pass a text of at most {MAX_SALT} characters.")
    check_text(salt, "cache_salt")
    return salt


def _special_stops(stops: Sequence[str], grammars: Grammars | None) -> frozenset[int]:
    """Return the special tokens that are stops. Raises RequestError for a stop that holds one among other text, which
    no text has: special tokens print nothing."""
    special = grammars.tokenizer.special_tokens if stops and grammars is not None else {}
    for place, stop in enumerate(stops):
        if (held := next((each for each in special.values() if each in stop and each != stop), None)) is not None:
            raise RequestError(
                f"stop[{place}] holds the special token {held!r} among other text, and special tokens print nothing; "
                "pass it as a text of its own."
            )
    return frozenset(token_id for token_id, each in special.items() if each in stops)


def check_stops(stop: object) -> tuple[str, ...]:
    """Stop strings as a caller passes them: one text, or several. Raises RequestError naming the one that is wrong."""
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise RequestError(f"stop is {shown(stop)}; pass a list of texts.")
    stops = tuple(islice(given, MAX_STOPS + 1))
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop holds more than {MAX_STOPS} texts; pass at most {MAX_STOPS}.")
    for place, text in enumerate(stops):
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop[{place}] is {shown(text)}; pass a text of at least one character.")
        check_text(text, f"stop[{place}]")
        size = len(text.encode())
        if size > MAX_STOP_BYTES:
            raise RequestError(f"stop[{place}] has {size} bytes; pass a text of at most {MAX_STOP_BYTES}.")
    return stops
