"""A request: options of a generation that were checked against a plan, and then are only read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.plans.errors import RequestError
from outrider.plans.manifest import Manifest, rejects
from outrider.plans.partial_kv import PartialMode
from outrider.runtime.numbers import shown
from outrider.runtime.options.draft_limits import DraftLimits, check_draft_limits
from outrider.runtime.options.options import OPTIONS, Options, check_options
from outrider.runtime.sampling import SamplingParams
from outrider.runtime.text.grammars import Grammars
from outrider.runtime.text.rules import LogitsRule, RuleContext
from outrider.runtime.trace import Watcher


@dataclass(frozen=True)
class Request:
    """Checked options, and what the generation begins with. `drafter` is None for plain decoding; `rules` are applied
    in their order.

    `token_ids` follow the prefix that branches share; of a branch that begins later, `late` returns them, called with
    the generations that have ended, by branch, and the seconds that it may wait. The branch with the most
    `predicted_tokens`, the caller's estimate, begins first.
    """

    max_new_tokens: int
    token_ids: Sequence[int] = ()
    late: Callable[[Mapping[int, Any], float], list[int] | None] | None = None
    predicted_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    drafter: str | None = None
    auto_disable: bool = True
    on_round: Watcher | None = None
    logprobs: int | None = None
    cancel: threading.Event | None = None
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


def resolve(options: Options, manifest: Manifest, grammars: Grammars) -> Request:
    """Check options against a plan. Raises RequestError naming the option and its limits."""
    values = check_options(options, manifest.target.vocab_size)
    if values["ignore_eos"] and values["structured_outputs"] is not None:
        raise RequestError(
            "ignore_eos is true, and a text that is to have a form ends with an end token; leave ignore_eos out."
        )
    if values["min_tokens"] > values["max_new_tokens"]:
        raise RequestError(
            f"min_tokens is {values['min_tokens']}; pass a whole number from 0 to max_new_tokens, which is "
            f"{values['max_new_tokens']}."
        )
    drafter = resolve_drafter(values["drafter"], manifest)
    spelled = _special_stops(values["stop"], grammars)
    own_ends = manifest.text.eos_token_ids if values["eos_token_ids"] is None else values["eos_token_ids"]
    ends = frozenset(own_ends) | spelled
    rules = _rules(RuleContext(values, ends, grammars))
    rejected = rejects([each for each in manifest.drafters if each.name == drafter])
    mode, budget = _resolve_partial_kv(values, manifest, drafter, rejected)
    ending = spelled if values["ignore_eos"] else ends
    _check_generated(values, mode, ending, drafter if rejected else None)
    read = ("max_new_tokens", "stop", "auto_disable", "on_round", "logprobs", "cancel", "min_tokens", "tentative")
    return Request(
        **{name: values[name] for name in (*read, "remember", "cache_salt", "generated")},
        sampling=SamplingParams.from_options(values),
        eos_token_ids=ending,
        drafter=drafter,
        rules=tuple(rule for of_option in rules.values() for rule in of_option),
        limits=check_draft_limits(values, drafter, manifest.drafters),
        partial_kv=mode,
        partial_budget=budget,
    )


def resolve_drafter(asked: str | None, manifest: Manifest) -> str | None:
    """Return the name of the plan's drafter that a request has, None for plain decoding. Raises RequestError."""
    names = [drafter.name for drafter in manifest.drafters]
    drafter = asked or (names[0] if names else "none")
    if drafter not in (*names, "none"):
        raise RequestError(f"The plan has no drafter {shown(drafter)}; it has {', '.join([*names, 'none'])}.")
    return None if drafter == "none" else drafter


def _rules(context: RuleContext) -> dict[str, Sequence[LogitsRule]]:
    """Return the rules of each option that has some, in their order. Options of one rule are named by the first."""
    found: dict[str, Sequence[LogitsRule]] = {}
    made = set()
    for name, option in OPTIONS.items():
        value = context.values[name]
        # Types first: what `==` of an array or of a caller's object returns is not asked.
        given = value is not option.default and not (type(value) is type(option.default) and value == option.default)
        if option.rule is not None and given and option.rule not in made:
            made.add(option.rule)
            if rules := option.rule(context):
                found[name] = rules
    return found


def _resolve_partial_kv(
    values: dict[str, Any], manifest: Manifest, drafter: str | None, rejected: bool
) -> tuple[PartialMode, int | Literal["auto"] | None]:
    """Return the mode and the budget of partial KV. `rejected` says that drafts are accepted by rejection. Raises
    RequestError."""
    partial, mode, budget = manifest.partial_kv, values["partial_kv"], values["partial_budget"]
    asked = mode not in (None, "off")
    if partial is None:
        given = "tentative" if values["tentative"] else "partial_kv" if asked else "partial_budget"
        if values["tentative"] or asked or budget is not None:
            raise RequestError(
                f"{given} is {shown(values[given])}, and the plan has no partial KV cache; build it with "
                "partial_kv.enabled."
            )
        return "off", None
    if asked and rejected:
        raise RequestError(
            f"partial_kv is {mode!r}, and tokens of the drafter {drafter!r}, which is accepted by rejection, depend on "
            "where they are verified; ask for another drafter, or leave partial_kv out."
        )
    window = manifest.target.widest_window
    least, most = partial.least_budget(window), partial.n_retrieval_blocks
    if isinstance(budget, int) and not least <= budget <= most:
        why = "" if least == 1 else f": layers of the model see the last {window} tokens, which {least} blocks reach"
        raise RequestError(f"partial_budget is {budget}; pass auto, or {least} to {most} blocks{why}.")
    return "off" if rejected else mode or partial.mode, partial.budget if budget is None else budget


def _check_generated(values: dict[str, Any], mode: str, ending: frozenset[int], rejecting: str | None) -> None:
    """Raise RequestError for tokens that a request cannot continue after; `rejecting` drafts and accepts by rejection,
    `ending` are the tokens that end it."""
    generated: tuple[int, ...] = values["generated"]
    if not generated:
        return
    if len(generated) >= values["max_new_tokens"]:
        raise RequestError(
            f"generated holds {len(generated)} tokens, and max_new_tokens is {values['max_new_tokens']}; the request "
            "is over."
        )
    if rejecting is not None or mode == "lossy":
        who = f"the drafter {rejecting!r}, which is accepted by rejection" if rejecting else "lossy partial KV"
        raise RequestError(
            f"generated holds tokens, and those of {who} depend on where rounds end; begin the request again without."
        )
    if values["seed"] is None and values["temperature"]:
        raise RequestError("generated holds tokens that were drawn, and there is no seed; pass that of their draws.")
    if not ending.isdisjoint(generated):
        raise RequestError("generated holds an end token, after which nothing follows; the request is over.")


def _special_stops(stops: Sequence[str], grammars: Grammars) -> frozenset[int]:
    """Return the special tokens that are stops. Raises RequestError for a stop that holds one among other text, which
    no text has: special tokens print nothing."""
    special = grammars.tokenizer.special_tokens if stops else {}
    for place, stop in enumerate(stops):
        if (held := next((each for each in special.values() if each in stop and each != stop), None)) is not None:
            raise RequestError(
                f"stop[{place}] holds the special token {held!r} among other text, and special tokens print nothing; "
                "pass it as a text of its own."
            )
    return frozenset(token_id for token_id, each in special.items() if each in stops)
