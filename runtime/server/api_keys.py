"""API keys: the file that holds them, and what requests share by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.plans.errors import RequestError
from outrider.plans.text_file import read_text_file

_SHARED = {
    "max_waiting_per_key": "shares the queue among API keys",
    "tokens_per_minute": "is a budget of each API key",
}


def read_api_keys(file: Path) -> list[str]:
    """The API keys of a file, one a line, without comments. Raises RequestError where there are none."""
    try:
        lines = read_text_file(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"The file of API keys {file} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise RequestError(f"The file of API keys {file} holds no key; write one a line.")
    return keys


def check_shares(settings: object, has_keys: bool, pass_key: str, spelled: Callable[[str], str] = str) -> None:
    """Raise RequestError where `settings` share something among API keys, and there are none.

    The error asks for `pass_key`, and names attributes of `settings` as `spelled` spells them.
    """
    for name, what in _SHARED.items():
        if getattr(settings, name, None) is not None and not has_keys:
            raise RequestError(f"{spelled(name)} {what}; pass {pass_key} too, or leave it out.")


def share_of_queue(max_waiting: int, asked: int | None, keys: int) -> int | None:
    """The most requests of one API key that wait: as `asked`, else half of all where there are several keys."""
    return asked or (max(1, max_waiting // 2) if keys > 1 else None)
