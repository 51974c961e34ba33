"""From the form that a request asks for to the grammar that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from outrider.plans.errors import RequestError
from outrider.plans.text_check import check_text
from outrider.runtime.text.structured_outputs import FORMS, guided, lark_text

MOST_CHOICES = 10_000
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


def to_grammar(asked: object) -> tuple[str, str]:
    """Return what errors call the form of `asked`, and its grammar as llguidance reads it.

    Raises RequestError for what is no form. Whether the grammar makes sense is for llguidance to say.
    """
    if not isinstance(asked, Mapping) or len(asked) != 1 or next(iter(asked)) not in FORMS:
        raise RequestError(
            "structured_outputs must be an object with exactly one of the keys " + ", ".join(FORMS) + "."
        )
    ((form, value),) = asked.items()
    where = f"structured_outputs.{form}"
    if form == "json":
        return where, of_schema(_schema(value, where), where)
    if form == "json_object":
        if value is not True:
            raise RequestError(f"{where} is {value!r}; pass true, or leave it out.")
        return where, of_schema({"type": "object"}, where)
    if form == "choice":
        return where, _of_choice(value, where)
    check_text(value, where)
    if form == "regex":
        return where, LLMatcher.grammar_from_regex(value)
    if _GBNF_RULE.search(value) is None:
        return where, LLMatcher.grammar_from_lark(value)
    return f"{where}, turned into Lark,", LLMatcher.grammar_from_lark(_from_gbnf(value, where))


def _from_gbnf(text: str, where: str) -> str:
    """Return a grammar of llama.cpp's as one for Lark."""
    plain = _GBNF_ESCAPE.sub(_unescaped, text).replace("&&", r"&\x26").replace("~~", r"~\x7e")  # operators in classes
    try:
        return gbnf_to_lark(plain)
    except IndexError:  # what the converter raises at the end of the text
        reason = "it ends inside a text or a class of characters"
    except Exception as error:  # it raises plain ones
        reason = str(error)
    raise RequestError(f"{where} is no grammar of llama.cpp's: {reason}. Correct it, or write it for Lark.")


def _unescaped(escape: re.Match[str]) -> str:
    """Write an escape of a character by its number as that character, or, of ASCII, in two digits."""
    if escape[1][0] not in "uU":
        return escape[0]
    number = int(escape[1][1:], 16)
    return f"\\x{number:02x}" if number < 0x80 else chr(min(number, 0x10FFFF))


def _schema(value: object, where: str) -> Mapping[str, object]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not JSON: {error}. Pass a JSON schema.") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is of type {type(value).__name__}; pass a JSON schema, which is an object.")
    return value


def of_schema(schema: Mapping[str, object], where: str) -> str:
    """Return the grammar of a JSON schema; `where` is what errors call it. Raises RequestError where it is no JSON."""
    try:
        text = json.dumps(guided(schema), allow_nan=False)
        return LLMatcher.grammar_from_json_schema(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} is no JSON schema that can be read: {error}. Correct it.") from None


def _of_choice(value: object, where: str) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence) or not 1 <= len(value) <= MOST_CHOICES:
        raise RequestError(f"{where} must be a list of 1 to {MOST_CHOICES} texts.")
    for place, text in enumerate(value):
        check_text(text, f"{where}[{place}]")
        if not text:
            raise RequestError(f"{where}[{place}] is empty; pass a text of at least one character.")
    # A terminal, which is one item for the parser however many texts it has.
    return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(lark_text, value)))
