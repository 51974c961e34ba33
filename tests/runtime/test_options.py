"""Options of a generation: one table of what is refused, and what each interface makes of the declarations."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from outrider.commands.arguments import Parser
from outrider.plans.errors import RequestError, UsageError
from outrider.runtime.__main__ import main
from outrider.runtime.cli.arguments import add_shared, flag_of, read_options
from outrider.runtime.options.kinds import Biases, Choice, Real, Switch, Texts, TokenIds, Whole
from outrider.runtime.options.options import OPTIONS, Doors, Options, check_options, offered
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest

NAN, INF, HUGE = float("nan"), float("inf"), 10**400

# An option or two of each kind; the limits of each are in `outrider.h`, which `embed/test_embed.py` compares.
REFUSED: list[tuple[str, list[Any], str]] = [
    ("max_new_tokens", [0, -1, 1.0, True, "1", NAN], "pass a whole number of at least 1."),
    (
        "stop",
        [5, b"a", {"a": 1}, iter("a"), np.array(5)],
        "pass a text, or a list of at most 16 texts of at most 1000 bytes.",
    ),
    ("bad_words", [5, "x", {"x": 1}], "pass a list of at most 1000 texts of at most 1000 bytes."),
    ("eos_token_ids", [5, "12"], "pass a list of token ids."),
    ("allowed_token_ids", [[], 5, "5", np.array(5)], "pass a list of at least one token id."),
    ("ignore_eos", [0, "no", NAN], "pass true or false."),
    ("temperature", [-0.1, 100.1, NAN, INF, True, "1", HUGE], "pass a number from 0 to 100."),
    ("top_p", [0.0, 1.1, -1, NAN, False, "1"], "pass a number above 0 and at most 1."),
    ("filter_order", ["first", 1, ["temperature_last"]], "pass one of temperature_first, temperature_last."),
    ("seed", [-1, 2**64, True, 1.0], f"pass a whole number from 0 to {2**64 - 1}."),
    ("logit_bias", [[5], "5"], 'pass numbers by token id, such as {"50256": -100}.'),
    ("logits_processors", [5, [5]], "pass a list of functions of the tokens so far and their logits."),
    ("drafter", [5], "pass the name of a drafter, or none."),
    ("partial_budget", [0, "all", 1.5], "pass a whole number of at least 1 or auto."),
    ("logprobs", [21, -1, "2", True], "pass a whole number from 0 to 20."),
    ("cache_salt", [5, "x" * 257], "pass a text of at most 256 characters."),
]


def refusal(own: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        check_options(own, 300)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(("name", "values", "said"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_values_outside_limits_are_refused_with_name_value_and_limits(name: str, values: list[Any], said: str) -> None:
    for value in values:
        sentence = refusal({name: value})
        assert sentence.startswith(f"{name} is ")
        assert sentence.endswith(f"; {said}")
        assert len(sentence) < 200  # of a number of 400 digits, 60 are shown


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"top_q": 1}, "Unknown option 'top_q' (did you mean 'top_p'?); the options are allowed_token_ids, "),
        ({"stop": ["a", 5]}, "stop[1] is 5; pass a text of at least one character."),
        ({"stop": ["a", "\ud83d"]}, "stop[1] holds half a character"),
        ({"stop": ["a"] * 17}, "stop holds more than 16 texts; pass at most 16."),
        ({"stop": ["é" * 501]}, "stop[0] has 1002 bytes; pass a text of at most 1000."),
        ({"bad_words": ["x", " "]}, "bad_words[1] is ' '; pass a text that is more than white space."),
        ({"cache_salt": "\ud83d"}, "cache_salt holds half a character"),
        ({"eos_token_ids": [3, -1]}, "eos_token_ids holds -1; pass token ids, whole numbers of at least 0."),
        ({"allowed_token_ids": [5, True]}, "allowed_token_ids holds True; pass token ids"),
        ({"generated": [300]}, "generated holds 300, which is not in the vocabulary; ids go from 0 to 299."),
        ({"top_k": 2**63}, f"top_k is {2**63}; pass a whole number of at most {2**63 - 1}."),
        ({"logit_bias": {"x": 1}}, "logit_bias holds 'x'; pass token ids"),
        ({"logit_bias": {5: 101}}, "logit_bias[5] is 101; pass a number from -100 to 100."),
        ({"cancel": True}, "cancel is of type bool; pass a threading.Event, and set it to cancel."),
        ({"on_round": 5}, "on_round is of type int; pass a function of one `RoundTrace`."),
        ({"constraint": 5}, "constraint is of type int; pass a LogitsRule."),
    ],
)
def test_what_is_wrong_within_a_value_is_named(own: dict[str, Any], said: str) -> None:
    assert refusal(own).startswith(said)


def test_values_that_do_not_print_are_refused() -> None:
    unprintable = type("Unprintable", (), {"__repr__": lambda self: 1 / 0})()
    assert refusal({"temperature": unprintable}).startswith("temperature is an object of type Unprintable; pass")
    assert refusal({"logit_bias": {"5": 10**5000}}).startswith("logit_bias[5] is a number of too many digits; pass a")


def test_limits_are_inclusive_and_numbers_become_pythons() -> None:
    most = {"temperature": np.float32(100), "top_k": np.int64(2**63 - 1), "top_p": 1, "seed": 2**64 - 1, "min_p": 1}
    found = check_options(most)  # type: ignore[arg-type]
    assert [type(found[name]) for name in most] == [float, int, float, int, float]
    assert check_options({"logit_bias": {"7": 100}, "stop": "end"})["logit_bias"] == {7: 100.0}
    assert check_options(dict.fromkeys(OPTIONS)) == check_options({})  # type: ignore[arg-type]


# Interfaces: each takes every option that is declared for it, and says what the table says.

RIGHT: dict[type, tuple[list[str], Any]] = {
    Whole: (["3"], 3),
    Real: (["0.5"], 0.5),
    Texts: (["a"], ["a"]),
    TokenIds: (["1,2"], [1, 2]),
    Biases: (["5=-1.5"], {5: -1.5}),
}


def parsed(*words: str) -> Options:
    parser = Parser(prog="outrider generate")
    add_shared(parser)
    parser.add_argument("--json", action="store_true")
    return read_options(parser.parse_args(["plan", "--json", *words]))


@pytest.mark.parametrize("name", offered(Doors.COMMAND))
def test_the_command_line_has_a_flag_for_each(name: str) -> None:
    option = OPTIONS[name]
    words, value = RIGHT.get(type(option.kind), (["none"], "none"))
    if isinstance(option.kind, Switch):
        words, value = [], not option.default
    elif isinstance(option.kind, Choice):
        words, value = [option.kind.words[0]], option.kind.words[0]
    assert parsed(flag_of(name), *words) == {name: value}
    check_options(parsed(flag_of(name), *words), 300)


def test_the_command_line_refuses_before_anything_is_loaded() -> None:
    for words in (["--top-k", "-1"], ["--seed", str(2**64)], ["--logit-bias", "5=101"], ["--partial-budget", "all"]):
        with pytest.raises(UsageError, match=f"{words[0]}"):
            parsed(*words)


@pytest.mark.parametrize("name", offered(Doors.SERVER))
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_server_has_a_field_for_each(name: str, kind: type[ChatRequest]) -> None:
    field = kind.model_fields[name]
    if name not in ("temperature", "top_p", "seed", "cache_salt"):  # OpenAI's limits, and two halves of a salt
        assert field.description == OPTIONS[name].kind.what
    assert not field.is_required()


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name}  python" in f"\n{listed}" for name in OPTIONS)
    assert main(["options", "top_p", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "top_p": {
            "pass": "a number above 0 and at most 1", "default": 1.0, "help": OPTIONS["top_p"].help, "flag": "--top-p",
            "command": True, "server": True, "c": True,
        }
    }  # fmt: skip
    assert main(["options", "top_q"]) == 2
