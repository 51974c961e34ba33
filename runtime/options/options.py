"""Every option of a generation, declared once: type, kind of value, default, what it does, which interfaces have it.

The keyword arguments of `generate`, the flags of the command line, the fields of the server and of batch lines, the
keys of the C library, their refusals and documentation all come from `Options`. A new option is a new line here. One
that changes logits also names the rule that it makes; one that filters tokens, its column in the ops' `sampling`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Flag, auto
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from outrider.plans.errors import RequestError
from outrider.plans.partial_kv import PARTIAL_MODES, PartialMode
from outrider.runtime.options.kinds import (
    Biases,
    Choice,
    Function,
    Functions,
    Instance,
    Kind,
    Object,
    Real,
    Switch,
    Text,
    Texts,
    TokenIds,
    Whole,
)
from outrider.runtime.sampling import FilterOrder
from outrider.runtime.text.rules import LogitsRule, RuleContext
from outrider.runtime.text.structured_outputs import StructuredOutputs
from outrider.runtime.text.token_rules import (
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsProcessor,
    MinTokens,
    Penalties,
    processors,
)
from outrider.runtime.trace import Watcher

MAX_LOGPROBS, MAX_STOPS, MAX_SALT = 20, 16, 256


class Doors(Flag):
    """Interfaces that have an option beside Python's calls."""

    COMMAND = auto()
    SERVER = auto()  # batch files too
    C = auto()


ALL, NONE = Doors.COMMAND | Doors.SERVER | Doors.C, Doors(0)


@dataclass(frozen=True)
class Option:
    """One option; None is the same as leaving it out.

    `help` is one sentence without its end. `flag` is the command line's, where it is not the name with hyphens, and
    `flag_help` its own sentence: of a switch that is on by default, the flag turns it off. `rule` makes the rule over
    logits that the option, or several with the same `rule`, come to.
    """

    kind: Kind
    help: str
    default: Any = None
    doors: Doors = ALL
    flag: str | None = None
    flag_help: str | None = None
    rule: Callable[[RuleContext], Sequence[LogitsRule]] | None = None

    @property
    def text(self) -> str:
        """What it does, what to pass, and its default."""
        known = "" if self.default in (None, (), {}, "") else f"; default: {str(self.default).lower()}"
        return f"{self.help[0].upper()}{self.help[1:]}. Pass {self.kind.what}{known}."


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and of every other call that generates; `outrider options` explains each."""

    max_new_tokens: Annotated[
        int | None,
        Option(
            Whole(1),
            "most tokens to generate; the context's end comes first where it is nearer",
            128,
            Doors.COMMAND | Doors.C,  # the server's is `max_tokens`
        ),
    ]
    stop: Annotated[
        str | Sequence[str] | None,
        Option(
            Texts(MAX_STOPS, 1000),
            "texts before which the generation ends; a special token's spelling makes it an end token",
            (),
        ),
    ]
    eos_token_ids: Annotated[
        Sequence[int] | None,
        Option(TokenIds(), "end tokens, in place of the plan's", doors=Doors.COMMAND | Doors.C),
    ]
    ignore_eos: Annotated[bool | None, Option(Switch(), "continue past end tokens", False)]

    # How tokens are drawn.
    temperature: Annotated[
        float | None, Option(Real(0, 100), "what logits are divided by; 0 is greedy, and no filter has an effect", 0.0)
    ]
    top_k: Annotated[int | None, Option(Whole(), "keep the k most probable tokens, ties included; 0 is off", 0)]
    top_p: Annotated[
        float | None, Option(Real(most=1, above=0), "keep the most probable tokens up to a sum of p; 1 is off", 1.0)
    ]
    min_p: Annotated[
        float | None,
        Option(
            Real(0, 1), "keep tokens that are at least this share as probable as the most probable one; 0 is off", 0.0
        ),
    ]
    top_n_sigma: Annotated[
        float | None,
        Option(
            Real(0, 100),
            "keep tokens at most this number of standard deviations of all logits below the largest; 0 is off",
            0.0,
        ),
    ]
    filter_order: Annotated[
        FilterOrder | None,
        Option(
            Choice(get_args(FilterOrder)),
            "temperature before the filters, or after them",
            "temperature_first",
            Doors.COMMAND | Doors.C,
        ),
    ]
    seed: Annotated[
        int | None, Option(Whole(most=2**64 - 1), "seed of the draws; default: a new one, which the result has")
    ]
    stream_id: Annotated[
        int | None,
        Option(
            Whole(),
            "which of the seed's streams of draws; a branch adds its number to it",
            0,
            Doors.COMMAND | Doors.C,
        ),
    ]
    skip_sample_adjustment: Annotated[
        bool | None,
        Option(
            Switch(),
            "for debugging drafters with acceptance: rejection: draw a rejected token's replacement from the target's "
            "own distribution, which is wrong",
            False,
            Doors.COMMAND | Doors.C,
        ),
    ]

    # Rules over logits, in the order in which they are applied, which is vLLM's; temperature and filters come after
    # them, and log-probabilities are those before them.
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Option(
            Object('an object of one key, such as {"regex": "[0-9]+"}'),
            "the form of the text: json (a schema), json_object (true), regex, grammar (Lark or llama.cpp), choice",
            doors=Doors.SERVER | Doors.C,  # the command line has a flag for each form
            rule=lambda context: [context.grammars.rule(context.values["structured_outputs"], context.ends)],
        ),
    ]
    constraint: Annotated[
        LogitsRule | None,
        Option(
            Instance(LogitsRule, "a LogitsRule"),
            "a rule of your own",
            doors=NONE,
            rule=lambda context: [context.values["constraint"]],
        ),
    ]
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Option(
            TokenIds(1),
            "the only tokens that may be generated",
            rule=lambda context: [AllowedTokens(context.values["allowed_token_ids"])],
        ),
    ]
    bad_words: Annotated[
        Sequence[str] | None,
        Option(
            Texts(1000, 1000, printing=True, alone=False),
            "texts that are not generated: the last token of one is excluded after the ones before it",
            (),
            flag="--bad-word",
            rule=BadWords.from_options,
        ),
    ]
    min_tokens: Annotated[
        int | None,
        Option(
            Whole(),
            "no end token and no end by a stop text before this number of tokens",
            0,
            rule=MinTokens.from_options,
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float] | Mapping[str, float] | None,
        Option(
            Biases(100.0),
            "numbers added to the logits of tokens, by their ids",
            rule=lambda context: [LogitBias(each) for each in [context.values["logit_bias"]] if each],
        ),
    ]
    logits_processors: Annotated[
        Sequence[LogitsProcessor] | None,
        Option(
            Functions("a list of functions of the tokens so far and their logits"),
            "functions of the generated tokens and the logits f32 [vocab], which return logits or change them in "
            "place, and depend on their arguments alone",
            (),
            NONE,  # C has a call for them
            rule=processors,
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Option(
            Real(1e-6, 1e6),
            "divides logits above 0 of tokens of the prompt and the text, and multiplies those below; 1 is off",
            1.0,
            rule=Penalties.from_options,
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        Option(
            Real(-2, 2),
            "subtracted from a token's logit for each time that the token was generated",
            0.0,
            rule=Penalties.from_options,
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Option(
            Real(-2, 2),
            "subtracted once from the logit of a token that was generated",
            0.0,
            rule=Penalties.from_options,
        ),
    ]

    # Drafting. Tokens stay the same, but for drafters with `acceptance: rejection`.
    drafter: Annotated[
        str | None,
        Option(Text(1000, "the name of a drafter, or none"), "a drafter of the plan, or none; default: its first"),
    ]
    draft_tokens: Annotated[
        int | None, Option(Whole(1), "draft at most this number of tokens in a pass, of a tree the likeliest")
    ]
    draft_depth: Annotated[int | None, Option(Whole(1), "draft at most this number of tokens after each other")]
    auto_disable: Annotated[
        bool | None,
        Option(
            Switch(),
            "draft, run ahead and verify only where that pays, by the clock",
            True,
            Doors.COMMAND | Doors.C,
            "--keep-drafting",
            "draft even while that costs more than it brings, by the clock, and verify whole drafts",
        ),
    ]
    remember: Annotated[
        bool | None,
        Option(
            Switch(),
            "keep the tokens for later drafts of other requests, where the drafter has a memory",
            True,
            Doors.SERVER | Doors.C,
        ),
    ]
    on_round: Annotated[
        Watcher | None,
        Option(
            Function("a function of one `RoundTrace`"),
            "called with a `trace.RoundTrace` after each round; what it raises ends the request",
            doors=NONE,
        ),
    ]

    # Partial KV.
    partial_kv: Annotated[
        PartialMode | None,
        Option(
            Choice(PARTIAL_MODES),
            "after long contexts, where the plan has a partial KV cache: lossless has the tokens of off; default: "
            "the plan's",
        ),
    ]
    partial_budget: Annotated[
        int | Literal["auto"] | None,
        Option(
            Whole(1, words=("auto",)),
            "blocks that the partial KV cache retrieves; default: the plan's",
            doors=Doors.COMMAND | Doors.C,
        ),
    ]
    tentative: Annotated[
        bool | None,
        Option(
            Switch(),
            "in lossless mode, yield spans of tokens that are not confirmed yet, marked; their text is what follows "
            "if all of them are confirmed",
            False,
            NONE,  # callbacks of C have no mark for them
        ),
    ]

    # What is returned, and how requests end and are continued.
    logprobs: Annotated[
        int | None,
        Option(
            Whole(0, MAX_LOGPROBS),
            "return each token's log-probability, and those of this number of the most probable tokens",
            doors=Doors.COMMAND | Doors.C,  # the server's is that of its two kinds of requests
        ),
    ]
    cancel: Annotated[
        threading.Event | None,
        Option(
            Instance(threading.Event, "a threading.Event, and set it to cancel"),
            "once set, the generation ends before its next step",
            doors=NONE,
        ),
    ]
    cache_salt: Annotated[
        str | None,
        Option(
            Text(MAX_SALT),
            "prefix cache and memories are shared among requests of equal salt alone, so that times reveal nothing "
            "about other requests",
            "",
            Doors.SERVER | Doors.C,
        ),
    ]
    generated: Annotated[
        Sequence[int] | None,
        Option(
            TokenIds(),
            "tokens that the same request has returned before, elsewhere or before a restart; it continues after them "
            "with the tokens and the text that it would have had",
            (),
            Doors.C,
        ),
    ]


def _declared(hint: Any) -> Option:
    (found,) = (each for each in hint.__metadata__ if isinstance(each, Option))
    option: Option = found
    return option


OPTIONS: dict[str, Option] = {
    name: _declared(hint) for name, hint in get_type_hints(Options, include_extras=True).items()
}
"""By name, in the order of declaration."""
Options.__doc__ = f"{Options.__doc__}\n\n" + "\n".join(f"- `{name}`: {each.text}" for name, each in OPTIONS.items())
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}


def offered(door: Doors) -> dict[str, Option]:
    """Return the options of an interface, by name."""
    return {name: option for name, option in OPTIONS.items() if door in option.doors}


def check_options(options: Options, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the values of all options, checked, with defaults of those that are left out.

    Raises RequestError naming the option, its value and its limits. What depends on the plan is checked by `resolve`,
    except that token ids are below `vocab_size`.
    """
    unknown = sorted(map(str, set(options) - set(OPTIONS)))
    if unknown:
        names = sorted(OPTIONS)
        meant = "".join(f" (did you mean {each!r}?)" for each in get_close_matches(unknown[0], names, 1))
        raise RequestError(f"Unknown option {unknown[0]!r}{meant}; the options are {', '.join(names)}.")
    given: Mapping[str, Any] = options
    return DEFAULTS | {
        name: option.kind.check(given[name], name, vocab_size)
        for name, option in OPTIONS.items()
        if given.get(name) is not None
    }
