"""How many examples properties have: what costs next to nothing has more of them in every run."""

from __future__ import annotations

from hypothesis import settings

cheap = settings(max_examples=max(40, settings.default.max_examples))
