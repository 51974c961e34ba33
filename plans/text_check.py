"""Texts of users, before anything reads them."""

from __future__ import annotations

from outrider.plans.errors import RequestError


def check_text(text: object, what: str) -> None:
    """Raise RequestError unless `text` is a str that UTF-8 can hold."""
    if not isinstance(text, str):
        raise RequestError(f"{what} must be text (str), not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"{what} holds half a character: U+{code:04X} at index {error.start} is a lone surrogate, which UTF-8 "
            "cannot hold. Decode the text completely before passing it."
        ) from error
