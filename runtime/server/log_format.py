"""How lines of a server's log are written; of its own, so that options can be read without the server's packages."""

from __future__ import annotations

from typing import Literal

LogFormat = Literal["json", "text"]
