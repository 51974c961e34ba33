"""Sizes of steps that devices record: few, so that all can be, and close, so that little is computed in vain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from compiler.design import PlanDesign
from plans import names
from plans.manifest import Buckets, Drafter, Engine, GraphDrafter, NgramDrafter


def step_buckets(design: PlanDesign, engines: Mapping[str, Engine]) -> dict[str, Buckets]:
    """By model. Drafts whose size an engine decides have a bucket each; an n-gram's are rounded up."""
    target, limits, drafters = {1}, design.limits, design.drafters
    own: dict[str, Iterable[int]] = {}
    for drafter in drafters:
        if isinstance(drafter, NgramDrafter):
            target.update(_doubled(1 + drafter.max_draft))
        else:
            target.update(range(2, 2 + drafter.longest) if drafter.entropy else (drafter.tree.nodes,))
            own[drafter.name] = _fed(drafter, drafters, keeps_levels=engines[drafter.name].keeps_levels)
    return {
        model: Buckets(
            new=tuple(size for size in sorted(sizes) if size <= limits[model][names.NEW]),
            view=view_buckets(design.target.view_bucket, limits[model][names.VIEW]),
        )
        for model, sizes in {names.TARGET: target, **own}.items()
    }


def view_buckets(least: int, most: int) -> tuple[int, ...]:
    """Views from `least` to `most`, both powers of two and what lies halfway between two: at most half as many keys
    again as are there."""
    views, size = [], least
    while size < most:
        views.append(size)
        size += max(least, 1 << (size.bit_length() - 2))
    return (*views, most)


def _doubled(most: int) -> set[int]:
    """2, 4, 8 and so on, and the largest."""
    return {min(1 << power, most) for power in range(1, most.bit_length() + 1)} if most > 1 else set()


def _fed(drafter: GraphDrafter, drafters: Sequence[Drafter], *, keeps_levels: bool) -> range:
    """How many tokens a round leaves the drafter to take in: what the target committed, or what has no row of these.

    A head takes in what n-grams committed in its place, too.
    """
    keeps = drafter.kind == "model" and (keeps_levels or drafter.entropy is not None)
    before = (d.max_draft for d in drafters if isinstance(d, NgramDrafter) and d.otherwise == drafter.name)
    longest = max(drafter.longest_path, *before, 0) if drafter.kind == "eagle3" else drafter.longest_path
    return range(1, 3 if keeps else 2 + longest)
