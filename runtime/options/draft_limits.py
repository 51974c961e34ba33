"""How much is drafted in a pass, within what the plan drafts. Tokens stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.plans.errors import RequestError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import Drafter, longest_draft, rejects
from outrider.runtime.options.kinds import Whole

_NAMES = ("draft_tokens", "draft_depth")


@dataclass(frozen=True)
class DraftLimits:
    """Checked options: most tokens drafted in a pass, and most of them one after another."""

    tokens: int | None = None
    depth: int | None = None


def check_draft_limits(values: Mapping[str, Any], drafter: str | None, drafters: Sequence[Drafter]) -> DraftLimits:
    """Check values of options against the plan's `drafters`, of which `drafter` is asked. Raises RequestError.

    Of drafters with `acceptance: rejection`, tokens depend on what is drafted: they have no limits.
    """
    given = {name: values[name] for name in _NAMES if values[name] is not None}
    if not given:
        return DraftLimits()
    first, by_name = next(iter(given)), {each.name: each for each in drafters}
    asked = None if drafter is None else by_name[drafter]
    fallback = by_name.get(asked.otherwise or "") if isinstance(asked, HostDrafter) else None
    if any(rejects([each]) for each in (asked, fallback) if each is not None):
        raise RequestError(
            f"{first} is given, and tokens of the drafter {drafter!r}, which is accepted by rejection, depend on what "
            "is drafted; ask for another drafter, or leave it out."
        )
    most = longest_draft(drafters)
    if not most:
        raise RequestError(f"{first} is given, and the plan has no drafter; leave it out.")
    tokens, depth = (_whole(given.get(name), name, most) for name in ("draft_tokens", "draft_depth"))
    return DraftLimits(tokens, depth)


def _whole(value: int | None, name: str, most: int) -> int | None:
    checked: int | None = None if value is None else Whole(1, most).check(value, name)
    return checked
