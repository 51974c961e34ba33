"""Which ids of clients are taken."""

from __future__ import annotations

import pytest

from outrider.runtime.server.request_ids import id_of


@pytest.mark.parametrize("given", ["a", "req_1", "6f1e-4a", "trace/7:9+a=b@c.d", "x" * 128])
def test_a_sane_id_is_taken(given: str) -> None:
    assert id_of([(b"host", b"x"), (b"x-request-id", given.encode())]) == given


@pytest.mark.parametrize("given", [b"", b" ", b"-a", b"a b", b"a\x1b[2J", b"\xff", b"x" * 129, b"a\n", b'"', b"a,b"])
def test_any_other_is_replaced(given: bytes) -> None:
    found = id_of([(b"x-request-id", given)])
    assert found.startswith("req_")
    assert len(found) == 36
    assert found != id_of([(b"x-request-id", given)])


def test_of_two_ids_neither_is_taken() -> None:
    assert id_of([(b"x-request-id", b"one"), (b"x-request-id", b"two")]).startswith("req_")
    assert id_of([]).startswith("req_")
