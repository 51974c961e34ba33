"""A request, as every process of a comparison knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request: its name for the reader, its prompt (token ids, or a text for a server), and its options."""

    name: str
    prompt: Any
    options: dict[str, Any]
