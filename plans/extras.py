"""Advice on installing an optional package that is missing."""

from __future__ import annotations


def install(extra: str, *, upgrade: bool = False) -> str:
    """The advice that ends a sentence: how to get the packages of `extra`, as pyproject.toml names them."""
    return f"run `pip install {'-U ' if upgrade else ''}'.[{extra}]'` at the top of Outrider's repository"
