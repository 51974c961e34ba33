"""Options of how much is drafted in a pass, within what the plan drafts. Tokens stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from outrider.plans.errors import RequestError
from outrider.plans.manifest import Drafter, EntropyGamma, GraphDrafter, NgramDrafter, longest_draft, rejects
from outrider.runtime.numbers import shown


class DraftOptions(TypedDict, total=False):
    """Options of how much is drafted in a pass; without them, what the plan says.

    - `draft_tokens`: at most so many tokens; of a tree, the likeliest.
    - `draft_depth`: at most so many one behind another.
    - `gamma_min`, `gamma_max`: the shortest and the longest chain of a drafter whose chains are as long as it is sure
      (`gamma: {min: .., max: ..}` of the recipe).

    Of drafters with `acceptance: rejection`, tokens depend on what was drafted: they take none of these.
    """

    draft_tokens: int | None
    draft_depth: int | None
    gamma_min: int | None
    gamma_max: int | None


@dataclass(frozen=True)
class DraftLimits:
    """Checked options: most tokens drafted in a pass, most of them one behind another, and lengths of chains."""

    tokens: int | None = None
    depth: int | None = None
    gamma: EntropyGamma | None = None


def check_draft_limits(options: DraftOptions, drafter: str | None, drafters: Sequence[Drafter]) -> DraftLimits:
    """Check the options against the plan's `drafters`, of which `drafter` is asked. Raises RequestError."""
    given = {name: options.get(name) for name in DraftOptions.__annotations__ if options.get(name) is not None}
    if not given:
        return DraftLimits()
    first, by_name = next(iter(given)), {each.name: each for each in drafters}
    asked = None if drafter is None else by_name[drafter]
    behind = by_name.get(asked.otherwise or "") if isinstance(asked, NgramDrafter) else None
    if any(rejects([each]) for each in (asked, behind) if each is not None):
        raise RequestError(
            f"{first} is given, and tokens of the drafter {drafter!r}, which is accepted by rejection, depend on what "
            "is drafted; ask for another drafter, or leave it out."
        )
    most = longest_draft(drafters)
    if not most:
        raise RequestError(f"{first} is given, and the plan has no drafter; leave it out.")
    tokens, depth = (_whole(given.get(name), name, 1, most) for name in ("draft_tokens", "draft_depth"))
    least, longest = given.get("gamma_min"), given.get("gamma_max")
    if least is None and longest is None:
        return DraftLimits(tokens, depth)
    engine = behind if isinstance(asked, NgramDrafter) else asked
    own = engine.entropy if isinstance(engine, GraphDrafter) else None
    if own is None:
        raise RequestError(
            f"{'gamma_max' if least is None else 'gamma_min'} is given, and the drafter {drafter or 'none'!r} has no "
            "chains that are as long as it is sure; name one with gamma: {max: ..}, or leave it out."
        )
    longest = _whole(longest, "gamma_max", 1, own.gamma_max) or own.gamma_max
    least = _whole(least, "gamma_min", 1, longest) or min(own.gamma_min, longest)
    return DraftLimits(tokens, depth, EntropyGamma(gamma_min=least, gamma_max=longest, beta=own.beta))


def _whole(value: object, name: str, least: int, most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name} is {shown(value)}; pass a whole number from {least} to {most}.")
    return value
