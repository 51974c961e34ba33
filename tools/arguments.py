"""A command-line argument that several tools have."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.plans.errors import RequestError


def drafters_named(asked: str | None, known: Iterable[str]) -> list[str]:
    """The drafters of `--drafters NAME,...`, of which "none" is one; all of them by default.

    Raises `RequestError` for a name that is not `known`.
    """
    names = ["none", *known]
    chosen = names if asked is None else asked.split(",")
    if wrong := [name for name in chosen if name not in names]:
        raise RequestError(f"--drafters names {wrong[0]!r}; the plan has {', '.join(names)}.")
    return chosen
