"""Structured outputs: texts of the form at any temperature, and the tokens of plain decoding with any drafter."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from outrider import Runtime
from outrider.plans.errors import RequestError
from outrider.runtime.options.options import Options
from tests.conftest import REJECTING, TOY_DRAFTERS

_NAMES = ["a", "name", "is_ok", "x y", "größe", "import", 'quo"te']
_VALUES: list[Any] = ["return", "", "日本", True, None, 0, -17, 2.5, [1, "b"], {"k": False}]


def draw_schema(seed: int) -> dict[str, Any]:
    """An object with at least one property, whose other properties are optional."""
    drawn = random.Random(seed)
    schema = _object(drawn, 2)
    if drawn.random() < 0.3:
        schema["$defs"] = {"part": _any(drawn, 1)}
        schema["properties"]["of"] = {"$ref": "#/$defs/part"}
    if drawn.random() < 0.5:
        schema["x-guidance"] = {"whitespace_flexible": False}
    return schema


def _any(drawn: random.Random, depth: int) -> dict[str, Any]:
    simple = ["integer", "string", "choice", "pattern", "format", "kind", "number"]
    kind = drawn.choice([*simple, "object", "array", "either"] if depth else simple)
    match kind:
        case "integer":
            least = drawn.randint(-500, 500)
            return {"type": "integer", "minimum": least, "maximum": least + drawn.randint(0, 5000)}
        case "string":
            least = drawn.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + drawn.randint(0, 6)}
        case "choice":
            if drawn.random() < 0.3:
                return {"const": drawn.choice(_VALUES)}
            return {"enum": drawn.sample(_VALUES, drawn.randint(1, 4))}
        case "pattern":
            return {"type": "string", "pattern": drawn.choice(["^[a-f]{2,5}$", "^(im|ex)port[0-9]?$", "^é{1,3}$"])}
        case "format":
            return {"type": "string", "format": drawn.choice(["date", "ipv4", "uuid"])}
        case "kind":
            return {"type": drawn.choice(["boolean", "null", ["boolean", "null"]])}
        case "number":
            return {"enum": drawn.sample([0.5, -1.25, 3e10, 7, 1000001], drawn.randint(1, 3))}
        case "array":
            least, items = drawn.randint(0, 2), _any(drawn, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + drawn.randint(0, 2)}
        case "either":
            return {"anyOf": [_any(drawn, depth - 1), _any(drawn, depth - 1)]}
    return _object(drawn, depth - 1)


def _object(drawn: random.Random, depth: int) -> dict[str, Any]:
    names = drawn.sample(_NAMES, drawn.randint(1, 3))
    required = [name for name in names if drawn.random() < 0.7] or names[:1]
    properties = {name: _any(drawn, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("schemas", [9, pytest.param(200, marks=pytest.mark.long)])
def test_answers_keep_to_their_schemas(reference: Runtime, schemas: int) -> None:
    """Random schemas, with each of the plan's drafters in turn; all but a few texts end by themselves."""
    drafters = [drafter.name for drafter in reference.manifest.drafters]
    ended = drafted = accepted = 0
    for seed in range(schemas):
        schema = draw_schema(seed)
        options = Options(structured_outputs={"json": schema}, temperature=1.0, seed=seed, max_new_tokens=400)
        options |= Options(drafter=drafters[seed % len(drafters)], auto_disable=False)
        found = reference.generate('config = json.loads("""', **options)
        drafted, accepted = drafted + found.stats.drafted, accepted + found.stats.accepted
        if found.finish_reason == "stop":
            ended += 1
            Draft202012Validator(schema).validate(json.loads(found.text))
        if seed % 20 == 0:
            for drafter in ["none", *drafters]:
                again = reference.generate('config = json.loads("""', **options | Options(drafter=drafter))
                assert again.token_ids == found.token_ids
    assert ended >= schemas - 4
    assert accepted > drafted / 8


@pytest.mark.parametrize("drafter", REJECTING)
def test_drafts_accepted_by_rejection_keep_to_the_form(everything: Runtime, drafter: str) -> None:
    """Where the drafter, which knows of no form, proposes what the form does not allow."""
    ended = drafted = 0
    for seed in range(6):
        schema = draw_schema(seed)
        options = Options(structured_outputs={"json": schema}, temperature=1.0, seed=seed, max_new_tokens=120)
        found = everything.generate([5 + seed, 6, 7], drafter=drafter, auto_disable=False, **options)
        drafted += found.stats.drafted
        if found.finish_reason == "stop":
            ended += 1
            Draft202012Validator(schema).validate(json.loads(found.text))
    assert ended > 2
    assert drafted > 0


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-c]{3,8}é?"}, "[a-c]{3,8}é?"),
    ({"choice": ["yes", "no", 'a "b"\n']}, '(yes|no|a "b"\n)'),
    ({"grammar": 'start: "x" ("y" | "z"){2} NUMBER\nNUMBER: /[0-9]{1,3}/'}, "x[yz]{2}[0-9]{1,3}"),
    ({"grammar": 'root ::= "(" root ")" | [0-9]'}, r"\(*[0-9]\)*"),
    ({"json": {"enum": ["a", 1]}}, '("a"|1)'),
    ({"json": '{"type": "boolean"}'}, "(true|false)"),
]


@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_each_kind_of_form(toy: Runtime, form: dict[str, Any], expected: str) -> None:
    for seed in range(4):
        found = toy.generate([seed, 6], structured_outputs=form, temperature=1.0, seed=seed, max_new_tokens=80)
        assert found.finish_reason == "length" or re.fullmatch(expected, found.text)
        assert found.finish_reason == "stop" or "root" in str(form)


def test_a_limit_ends_a_text_first(toy: Runtime) -> None:
    whole = toy.generate([5], structured_outputs={"regex": "[a-f]{30}"}, max_new_tokens=100)
    cut = toy.generate([5], structured_outputs={"regex": "[a-f]{30}"}, max_new_tokens=7)
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    assert cut.token_ids == whole.token_ids[:7]


def test_a_form_that_allows_everything_changes_nothing(reference: Runtime) -> None:
    for seed in range(3):
        options = Options(max_new_tokens=40, temperature=0.6, top_p=0.9, seed=seed)
        free = reference.generate("import os\n", drafter="none", **options)
        found = reference.generate("import os\n", structured_outputs={"regex": "(.|\n)*"}, **options)
        assert found.token_ids == free.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
def test_text_that_keeps_to_a_form_is_drafted(
    toy: Runtime, branch_plan: Path, drafter: str, temperature: float
) -> None:
    allowed = "[abc ]*" if drafter in ("ngram", "short") else "[ -~\u00a0-\u00ff]*"  # n-grams foresee what comes again
    form: Any = {"structured_outputs": {"regex": allowed}}
    options = Options(max_new_tokens=90, temperature=temperature, auto_disable=False, seed=0, **form)
    prompts = [[(37 * i + place) % 299 + 1 for i in range(20)] for place in range(2)]
    expected = [toy.generate(prompt, **options | Options(drafter="none")).token_ids for prompt in prompts]
    found = [toy.generate(prompt, **options | Options(drafter=drafter)) for prompt in prompts]
    assert [each.token_ids for each in found] == expected
    rarely_right = ("short", "block")
    assert sum(each.stats.accepted for each in found) > 0 or drafter in rarely_right
    together = Runtime.load(branch_plan, threads=1)
    assert [each.token_ids for each in together.generate(prompts, **options | Options(drafter=drafter))] == expected
    together.close()


def test_a_choice_is_the_likeliest_that_may_come(toy: Runtime) -> None:
    words = [" import", "return", "zebra"]
    found = toy.generate("x =", structured_outputs={"choice": words}, max_new_tokens=20)
    assert found.text in words
    session = toy.session()
    next(session.stream("x =", max_new_tokens=1, drafter="none", ignore_eos=True))
    texts = toy.tokenizer.text_bytes()
    first = [bool(text) and any(word.encode().startswith(text) for word in words) for text in texts]
    logits = np.where(first, session.step_logits(0), -np.inf)
    assert found.token_ids[0] == int(logits.argmax())


def test_a_turn_has_a_form_of_its_own(toy: Runtime) -> None:
    session = toy.session()
    for word in ("yes", "no", "yes"):
        assert session.generate("?", structured_outputs={"choice": [word]}, max_new_tokens=9).text == word
    assert session.generate("?", max_new_tokens=9, ignore_eos=True).text != "yes"


def test_a_grammar_that_is_too_much_for_its_text_ends_in_an_error(toy: Runtime) -> None:
    with pytest.raises(RequestError, match="The grammar cannot be served: lexer error: too many expressions"):
        toy.generate([5], structured_outputs={"regex": "a{9999}{9999}"}, max_new_tokens=50)
