"""A request whose task is cancelled, as Ray Serve does when a client goes, ends."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from outrider import Runtime
from outrider.runtime.server.app import make_app
from outrider.runtime.server.config import ServerConfig
from outrider.runtime.server.submitting import Submitter
from tests.integration.served import KEY, settle

BUDGET = 2000


async def ask(app: ASGIApp, **asked: Any) -> dict[str, str]:
    """Send a completion's body to the application itself, in this task; the headers of the answer."""
    body = json.dumps({"model": "toy", "prompt": [5], "ignore_eos": True, **asked}).encode()
    given = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "content-length": str(len(body))}
    found: dict[str, str] = {}
    coming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not coming:
            await asyncio.sleep(60)
        return coming.pop()

    async def send(message: Message) -> None:
        found.update({name.decode(): value.decode() for name, value in message.get("headers", ())})

    headers = [(name.encode(), value.encode()) for name, value in given.items()]
    where = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
    await app(where | {"headers": headers}, receive, send)
    return found


def test_a_request_that_is_cancelled_while_a_thread_prepares_it_ends_and_gives_its_tokens_back(
    branch_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled, ready = threading.Event(), threading.Event(), threading.Event()
    original = Submitter.submit

    def slowly(self: Submitter, *arguments: Any) -> Any:
        begun.set()
        assert cancelled.wait(60)
        submitted = original(self, *arguments)
        ready.set()
        return submitted

    async def use(runtime: Runtime) -> int:
        app = make_app(runtime, ServerConfig("toy", api_key=KEY, tokens_per_minute=BUDGET))
        with monkeypatch.context() as patched:
            patched.setattr(Submitter, "submit", slowly)
            asking = asyncio.create_task(ask(app, max_tokens=140))
            assert await asyncio.to_thread(begun.wait, 60)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            cancelled.set()
            assert await asyncio.to_thread(ready.wait, 60)
        await asyncio.to_thread(settle, runtime)
        await asyncio.sleep(0.2)  # the event loop hears of it
        return int((await ask(app, max_tokens=1))["x-ratelimit-remaining-tokens"])

    runtime = Runtime.load(branch_plan, threads=1)
    try:
        runtime.start()
        remaining = asyncio.run(use(runtime))
        made = runtime.scheduler_stats.new_tokens
    finally:
        runtime.close(drain=False, timeout=60)
    assert made < 140
    assert remaining >= BUDGET - 3 - made  # the prompts are a token each, and the second answer
