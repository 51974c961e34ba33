"""`prices.json`, beside `plan.json`: what a pass of the target costs by its rows, on the machine that measured it.

It is no part of the plan: no tokens depend on it, it has no hash, and a plan without it, or with one that cannot be
read, is whole.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from outrider.plans.buffers import Strict
from outrider.plans.errors import PlanError

PASS_PRICES = "prices.json"
_LARGEST = 2**16  # bytes
_MOST = 512  # sizes
_ADVICE = "`outrider tune PLAN --prices` writes it anew"


class Price(Strict):
    """Median `ms` of a pass over `rows` tokens of one sequence: the tip and what hangs after it."""

    rows: int = Field(ge=1)
    ms: float = Field(gt=0)


class PassPrices(Strict):
    """Prices of passes of the plan `identity` after `context` tokens, ascending by rows from 1 on.

    They hold for the `backend`, the `device` that ran it (the processor, or the GPU) and `threads` threads of the
    processor.
    """

    identity: str
    backend: str
    device: str
    threads: int = Field(ge=1)
    context: int = Field(ge=0)
    prices: Annotated[tuple[Price, ...], Field(min_length=1, max_length=_MOST)]

    @model_validator(mode="after")
    def _ascending(self) -> PassPrices:
        rows = [price.rows for price in self.prices]
        if rows[0] != 1 or any(one >= other for one, other in pairwise(rows)):
            raise ValueError("rows do not ascend from 1")
        return self


def write_pass_prices(prices: PassPrices, root: Path) -> Path:
    """Write the prices beside the `plan.json` of the plan at `root`; return the file.

    Raises `PlanError` where it cannot be written.
    """
    path = root / PASS_PRICES
    try:
        path.write_text(prices.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path} cannot be written ({error}); make the plan's folder writable, or copy it") from None
    return path


def read_pass_prices(root: Path) -> PassPrices | None:
    """The prices of the plan at `root`; None where nobody has measured them. Raises `PlanError` for a file that
    holds none, or keys that are not known here; the plan needs none."""
    path = root / PASS_PRICES
    try:
        if not os.path.lexists(path):
            return None
        if path.is_symlink() or not path.is_file():  # reading a pipe would never end
            raise PlanError(f"{path} is a link, or no file; {_ADVICE}")
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise PlanError(f"{path} is larger than any table of prices; {_ADVICE}")
        return PassPrices.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PlanError(f"{path}: {key}: {first['msg']}; {_ADVICE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read ({error}); {_ADVICE}") from None
