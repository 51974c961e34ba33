"""A plan's table of prices (`plans/pass_prices.py`), where it holds: what it was measured on is what runs here."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from outrider.plans.backends import BACKENDS
from outrider.plans.errors import PlanError
from outrider.plans.machine import available_cores
from outrider.plans.pass_prices import PASS_PRICES, read_pass_prices
from outrider.plans.plan import Plan
from outrider.runtime.backends import device_of
from outrider.runtime.drafters.verify_length import PriceCurve

_LOG = logging.getLogger("outrider")


@dataclass(frozen=True)
class Conditions:
    """What the price of a pass depends on, beside the plan's own files; see `PassPrices`."""

    identity: str
    backend: str
    device: str
    threads: int


def conditions_here(plan: Plan, backend: str, threads: int) -> Conditions:
    """The conditions of `plan` on this machine; `threads` as they were asked for, 0 where the backend chooses."""
    threads = (threads or available_cores()) if BACKENDS[backend].on_processor else 1
    return Conditions(plan.manifest.identity, backend, device_of(backend), threads)


def load_prices(plan: Plan, backend: str, threads: int) -> PriceCurve | None:
    """The prices of the target's passes; None where they were never measured. None too where they cannot be read,
    or were measured under other conditions, and the log says so."""
    try:
        table = read_pass_prices(plan.root)
    except PlanError as error:
        _LOG.warning("%s; until then drafts are verified whole", error)
        return None
    if table is None:
        return None
    for name, here in asdict(conditions_here(plan, backend, threads)).items():
        if (there := getattr(table, name)) != here:
            _LOG.info(
                "%s was measured with %s %s, and here it is %s: drafts are verified whole; `outrider tune PLAN "
                "--prices` measures it again",
                plan.root / PASS_PRICES,
                name,
                there,
                here,
            )
            return None
    return PriceCurve(table.prices)
