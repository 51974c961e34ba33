"""Bodies and requests that are wrong, made of good ones by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 1.5, -0.0, 1e308, "", "x", "\ud800", "\x00", "null",
    [], {}, [[]], [None], [{}], {"a": 1}, [1.5], ["x"] * 30, [-1], [2**64], "\u202e", "0" * 3000,
)  # fmt: skip
_KEYS = (
    "best_of", "echo", "suffix", "messages", "prompt", "tools", "tool_choice", "response_format", "logit_bias", "stop",
    "structured_outputs", "n", "max_tokens", "stream_options", "deadline", "priority", "drafter", "draft_tokens",
    "top_logprobs", "logprobs", "bad_words", "allowed_token_ids", "partial_kv", "chat_template_kwargs", "min_tokens",
    "repetition_penalty", "seed", "temperature", "top_p", "top_k", "min_p", "__proto__", "\ud800", "a" * 2000, "",
)  # fmt: skip
_LITERALS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"0x10", b"01", b"+1", b"'x'", b'"\\ud800"',
             b'"\\x"', b'"\n"', b"tru", b"nul", b"[" * 3000, b'{"a":' * 3000, b"\xff", b'"\xc0\x80"', b'"\xed\xa0\x80"',
             b"/*x*/1", b"1,", b"", b"\x00")  # fmt: skip


def malformed(good: dict[str, Any], draw: random.Random, most_bytes: int) -> bytes:
    """A body made of a good one in one of all ways. Some are right by chance."""
    return draw.choice(_WAYS)(json.loads(json.dumps(good)), draw, most_bytes)


def _encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def _bytes_changed(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    data = bytearray(_encoded(body))
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data))
        draw.choice((_flip, _drop, _repeat))(data, place, draw)
        if not data:
            break
    return bytes(data)


def _flip(data: bytearray, place: int, draw: random.Random) -> None:
    data[place % len(data)] = draw.randrange(256)


def _drop(data: bytearray, place: int, draw: random.Random) -> None:
    del data[place : place + draw.randint(1, 20)]


def _repeat(data: bytearray, place: int, draw: random.Random) -> None:
    data[place:place] = data[place : place + draw.randint(1, 20)] or b"["


def _cut(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    data = _encoded(body)
    return data[: draw.randrange(len(data))]


def _literal(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    body[draw.choice([*body, *_KEYS[:20]])] = "@@@"
    return _encoded(body).replace(b'"@@@"', draw.choice(_LITERALS), 1)


def _value(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    body[draw.choice([*body, *_KEYS])] = draw.choice(_VALUES)
    return _encoded(body)


def _inner_value(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    """A value somewhere inside, such as of a message or a schema."""
    place: Any = body
    while True:
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.3:
            place[key] = draw.choice(_VALUES)
            return _encoded(body)
        place = inner


def _missing(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    body.pop(draw.choice(list(body)))
    return _encoded(body)


def _unknown(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    for _ in range(draw.choice([1, 1, 3, 1000])):
        body["".join(draw.choice("abcxyz_. \u00e9\U0001f600") for _ in range(draw.randint(0, 40)))] = 1
    return _encoded(body)


def _other_root(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    return _encoded(draw.choice([[body], "text", 5, None, [], True, [[body]] * 3, json.dumps(body)]))


def _deep(body: dict[str, Any], draw: random.Random, _: int) -> bytes:
    depth = draw.choice([50, 500, 5000, 50_000])
    opened, closed = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    body[draw.choice([*body, "metadata", "structured_outputs"])] = "@@@"
    closing = closed * depth if draw.random() < 0.7 else b""
    return _encoded(body).replace(b'"@@@"', opened * depth + b"1" + closing, 1)


def _large(body: dict[str, Any], draw: random.Random, most: int) -> bytes:
    key = draw.choice(
        ["user", "stop", "prompt", "bad_words", "logit_bias", "allowed_token_ids", "metadata", "messages"]
    )
    room = most * draw.choice([3, 9, 9]) // 10
    values: dict[str, Callable[[], Any]] = {
        "user": lambda: "x" * room,
        "stop": lambda: ["ab"] * (room // 7),
        "prompt": lambda: draw.choice(
            [["x"] * (room // 6), [5] * (room // 4), [[5]] * (room // 6), "y " * (room // 2)]
        ),
        "bad_words": lambda: ["z" * 5] * (room // 10),
        "logit_bias": lambda: {str(number): 1 for number in range(room // 12)},
        "allowed_token_ids": lambda: [1] * (room // 4),
        "metadata": lambda: {str(number): "" for number in range(room // 14)},
        "messages": lambda: [{"role": "user", "content": ""}] * (room // 36),
    }
    body[key] = values[key]()
    return _encoded(body)[: most if draw.random() < 0.8 else most * 2]


def _grammar(body: dict[str, Any], draw: random.Random, most: int) -> bytes:
    """Forms that are wrong, huge, or explode."""
    room = most * draw.choice([1, 5, 9]) // 10
    many = min(room // 30, 20_000)
    forms: tuple[Callable[[], Any], ...] = (
        lambda: {"regex": draw.choice(["(", "[", "a{5,2}", "(?P<x", "\\", "*", "(?<=a)b", "\\1", "[[:foo:]]", "a**"])},
        lambda: {
            "regex": draw.choice(["(a{1000}){1000}", "(((a{100}){100}){100}){100}", "(a|b|ab)*c{9999}", "(a*)*b"])
        },
        lambda: {"regex": "(" * (room // 2) + ")" * (room // 2)},
        lambda: {"regex": "a" * room},
        lambda: {"regex": "|".join(f"w{number}x" for number in range(many))},
        lambda: {"regex": ".{0,5000}x.{0,5000}y.{0,5000}"},
        lambda: {"grammar": "start: " + "a " * (room // 2)},
        lambda: {"grammar": "start: a\na: b\nb: a\n"},
        lambda: {
            "grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(many)) + f'r{many}: "x"'
        },
        lambda: {"grammar": 'start: "' + "q" * room + '"'},
        lambda: {
            "grammar": draw.choice(["", "start", "start:", "%json {", "start: %json {}", "start: /(/", "?", "\x00"])
        },
        lambda: {"choice": ["x" * 8] * (room // 12)},
        lambda: {"choice": [f"w{number}" for number in range(many)]},
        lambda: {"json": _schema(draw, many)},
        lambda: {"json": _nested(draw.choice([10, 200, 5000]))},
        lambda: {"json": {"type": draw.choice(["objekt", 5, None, ["string", "x"]]), "minimum": "x"}},
        lambda: {"json": {"$ref": draw.choice(["#", "#/a/b", "http://127.0.0.1/x", "#/$defs/x"])}},
        lambda: {"json": {"type": "string", "pattern": draw.choice(["(", "(a{1000}){1000}", "a" * min(room, 50_000)])}},
        lambda: {"json": {"type": "array", "minItems": 10 ** draw.randint(1, 18), "items": {"type": "integer"}}},
        lambda: {
            "json": {"type": "integer", "minimum": 10 ** draw.randint(1, 300), "multipleOf": draw.choice([0, 7, 1e-9])}
        },
        lambda: {"regex": "a", "json": {}},
        lambda: {"regex": 5},
        lambda: {},
    )
    form = draw.choice(forms)()
    if draw.random() < 0.2 and "json" in form:
        chat = {"type": "json_schema", "json_schema": {"name": "o", "schema": form["json"]}}
        body = {"model": body.get("model"), "messages": [{"role": "user", "content": "x"}], "response_format": chat}
        return _fitting(body, most)
    return _fitting({**body, "structured_outputs": form}, most)


def _fitting(body: dict[str, Any], most: int) -> bytes:
    """Encoded, within the limit: cut where it is longer."""
    return json.dumps(body, default=str).encode()[:most]


def _schema(draw: random.Random, many: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(min(many, 5000))]
    keyword = draw.choice(["properties", "anyOf", "enum", "allOf"])
    if keyword == "properties":
        return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    return {keyword: names if keyword == "enum" else [{"const": name} for name in names]}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(min(depth, 400)):  # as deep as the standard library writes
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


_WAYS: tuple[Callable[[dict[str, Any], random.Random, int], bytes], ...] = (
    _bytes_changed, _bytes_changed, _bytes_changed, _cut, _cut, _literal, _literal, _value, _value, _value,
    _inner_value, _inner_value, _missing, _unknown, _other_root, _deep, _large, _grammar,
)  # fmt: skip


def rubbish(draw: random.Random) -> bytes:
    """A request that is none, or hardly one, as bytes."""
    path, length = b"/v1/completions", b"Content-Length: 2\r\n"
    host, kind = b"Host: localhost\r\n", b"Content-Type: application/json\r\n"
    requests: tuple[bytes, ...] = (
        b"\r\n\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        draw.randbytes(300) + b"\r\n\r\n",
        b"POST " + path + b" HTTP/1.1\r\n" + length + kind + b"\r\n{}",  # no host
        b"POST " + path + b" HTTP/1.1\r\n" + host + host + length + b"\r\n{}",
        b"POST " + path + b" HTTP/9.9\r\n" + host + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Length: -5\r\n\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Length: 9" + b"9" * 40 + b"\r\n\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Length: two\r\n\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Transfer-Encoding: gzip, chunked\r\n" + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"X: " + b"a" * 100_000 + b"\r\n" + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"X\r\n" + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"X : y\r\n" + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"X: \x00\r\n" + length + b"\r\n{}",
        b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + host + length + b"\r\n{}",
        b"POST " + path + b"\xff HTTP/1.1\r\n" + host + length + b"\r\n{}",
        b"post " + path + b" http/1.1\r\n" + host + length + b"\r\n{}",
        b"BREW " + path + b" HTTP/1.1\r\n" + host + length + kind + b"\r\n{}",
        b"GET /%00%ff%zz HTTP/1.1\r\n" + host + b"\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n" + host + b"\r\n",
        b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n",
        b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n" + host + b"\r\n",
        b"DELETE " + path + b" HTTP/1.1\r\n" + host + b"\r\n",
        b"POST " + path + b" HTTP/1.1\r\n" + host + kind + b"Content-Length: 2\r\n\r\n{}GARBAGE\r\n\r\n",
        b"POST " + path + b" HTTP/1.1\r\n" + host + kind + b"Expect: 200-maybe\r\n" + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Type: text/\xe9\r\n" + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Type: multipart/form-data\r\n" + length + b"\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Encoding: gzip\r\n" + kind + length + b"\r\n\x1f\x8b",
    )
    return draw.choice(requests)
