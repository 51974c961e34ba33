"""The server's HTTP: bodies, paths, methods, keys, origins and hosts."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider import PrefixCacheConfig, Runtime
from outrider.plans.errors import RequestError
from outrider.runtime.server.app import ServerConfig
from tests.integration.served import KEY, client_of, get, listening, settle


@pytest.fixture(scope="module")
def address(branch_plan: Path) -> Iterator[str]:
    with listening(Runtime.load(branch_plan, threads=1), api_key=KEY, max_body_bytes=20_000) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address, KEY) as found:
        yield found


def asked(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; headers' names have `_` for `-`."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named, encode_chunked=isinstance(body, Iterator))
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"{", "application/json", "The body is not JSON: .* at character 2"),
        (b"[" * 15_000, "application/json", "The body cannot be read as JSON: it is nested too deeply"),
        (b'"\xff"', "application/json", "The body cannot be read as JSON: it is no UTF-8 text"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", "it has a number of too many digits"),
        (b'{"model": "toy", "prompt": "x", "\\ud800": 1}', "application/json", r"\\ud800 is no known key"),
        (b'{"model": "toy", "prompt": "x", "seed": "\\ud800"}', "application/json", r'seed is "\\ud800"; pass a whole'),
        (
            b'{"model": "toy", "prompt": "x", "' + b"k" * 5000 + b'": 1}',
            "application/json",
            "^k{60}[.]{3} is no known key",
        ),
        (b"[]", "application/json", r"The body is \[\]; send a JSON object"),
        (b"{}", "text/plain", "send it with the header Content-Type: application/json"),
        (b"", "application/json", "The body is empty"),
        (b'{"model": "toy"}', "application/json", "prompt is missing; pass text, token ids, or a list of either"),
    ],
)
def test_bodies_that_are_none_are_refused(address: str, data: bytes, kind: str, words: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
    status, body = get(f"{address}/v1/completions", headers, data)
    assert status == 400
    assert re.search(words, json.loads(body)["error"]["message"])


def test_paths_that_are_none_are_named(address: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for path, data, words in (
        ("/v1/embeddings", b"{}", "There is nothing at /v1/embeddings; this server has /v1/completions"),
        ("/v1/completions", b'{"model": "\\ud800", "prompt": "x"}', r"There is no model '\ud800' here; pass 'toy'."),
        ("/v1/completions", None, "/v1/completions cannot be asked by GET; use POST"),
    ):
        status, body = get(f"{address}{path}", headers, data)
        assert status in (404, 405)
        assert words in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("shared", [False, True])
def test_what_one_key_asked_no_other_can_find_out(branch_plan: Path, shared: bool) -> None:
    """`cached_tokens` shows what is in the cache."""
    kept = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=4096))
    prompt = "import os\nimport sys\ndef main("
    with listening(kept, api_key=["one", "two"], share_prefixes=shared) as address:

        def cached(key: str, **own: Any) -> int:
            with client_of(address, key) as client:
                found = client.completions.create(model="toy", prompt=prompt, max_tokens=2, extra_body=own)
            settle(kept)
            assert found.usage is not None
            assert found.usage.prompt_tokens_details is not None
            return found.usage.prompt_tokens_details.cached_tokens or 0

        assert cached("one") == 0
        assert cached("one") > 0
        for salt in ("a", "b"):
            stream = kept.stream_branches([5] * 40, [[1], [2]], max_new_tokens=2, cache_salt=salt)
            assert len(list(stream)) > 0
            assert (stream.stats.reused_tokens, stream.stats.cached_tokens) == (0, 0)
        assert (cached("two") > 0) is shared
        assert cached("two") > 0
        assert cached("one", cache_salt="a") == 0
        assert cached("one", cache_salt="b") == 0
        assert cached("one", cache_salt="a") > 0
        assert (cached("two", cache_salt="a") > 0) is shared


def test_what_http_has_besides(address: str, client: openai.OpenAI) -> None:
    """HEAD, bodies in chunks, and schemes of keys in any case."""
    key = {"Authorization": f"bearer {KEY}"}
    for path in ("/health", "/health/live", "/health/ready", "/v1/models", "/v1/models/toy", "/metrics"):
        status, headers, body = asked(address, "HEAD", path, **key)
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 0
    own: dict[str, Any] = {"model": "toy", "prompt": "import os\n", "max_tokens": 4, "temperature": 0}
    text = json.dumps(own).encode()
    given = asked(
        address, "POST", "/v1/completions", iter([text[:9], text[9:]]), Content_Type="application/json", **key
    )
    assert given[0] == 200
    assert json.loads(given[2])["choices"][0]["text"] == client.completions.create(**own).choices[0].text
    for wrong in (KEY, f"Basic {KEY}", f"Bearer{KEY}"):
        assert asked(address, "GET", "/v1/models", Authorization=wrong)[0] == 401


@pytest.mark.parametrize(
    ("config", "origin", "may"),
    [
        ({}, "http://localhost:3000", True),
        ({}, "https://127.0.0.1", True),
        ({}, "http://localhost.attacker.example", False),
        ({}, "https://chat.example", False),
        ({"allow_origins": ["https://chat.example"], "api_key": KEY}, "https://chat.example", True),
        ({"allow_origins": ["*"]}, "https://any.example", True),
    ],
)
def test_pages_of_which_origins_may_ask(branch_plan: Path, config: dict[str, Any], origin: str, may: bool) -> None:
    with listening(Runtime.load(branch_plan, threads=1), **config) as address:
        wanted = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,content-type",
        }
        status, headers, _ = asked(address, "OPTIONS", "/v1/chat/completions", Origin=origin, **wanted)
        assert (status == 200) is may
        assert (headers.get("access-control-allow-origin") in (origin, "*")) is may
        refused = asked(address, "GET", "/nowhere", Origin=origin, Authorization=f"Bearer {KEY}")
        assert refused[0] == 404
        assert (refused[1].get("access-control-allow-origin") in (origin, "*")) is may


def test_without_a_key_a_name_that_is_not_known_is_refused(branch_plan: Path) -> None:
    with listening(Runtime.load(branch_plan, threads=1), allow_hosts=["Box.example"]) as address:
        for host in (
            "localhost:80",
            "localhost.",
            "foo.localhost:1",
            "127.0.0.1",
            "[::1]:8000",
            "10.1.2.3",
            "box.example:8000",
        ):
            assert asked(address, "GET", "/v1/models", Host=host)[0] == 200
        for path in ("/v1/models", "/metrics"):
            for name in ("[", "notlocalhost", "localhost.attacker.example", "127.0.0.1.attacker.example"):
                assert asked(address, "GET", path, Host=name)[0] == 403
            status, _, body = asked(address, "GET", path, Host="attacker.example")
            assert (status, json.loads(body)["error"]["code"]) == (403, "host_not_allowed")
        assert asked(address, "GET", "/health/ready", Host="attacker.example")[0] == 200
    with listening(Runtime.load(branch_plan, threads=1), api_key=KEY, protect_metrics=True) as address:
        assert asked(address, "GET", "/metrics", Host="any.example")[0] == 401
        assert asked(address, "GET", "/metrics", Host="any.example", Authorization=f"Bearer {KEY}")[0] == 200
    with pytest.raises(RequestError, match="allow_hosts holds 'box:80'; pass a name alone"):
        ServerConfig("toy", allow_hosts=["box:80"])
    with pytest.raises(RequestError, match="protect_metrics is true, and there is no API key"):
        ServerConfig("toy", protect_metrics=True)
