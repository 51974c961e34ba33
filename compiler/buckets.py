"""Step sizes that devices record: few, so that all can be recorded, and close, so that little padding is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outrider.compiler.design import PlanDesign
from outrider.plans import names
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import Buckets, Drafter, Engine, GraphDrafter


def step_buckets(design: PlanDesign, engines: Mapping[str, Engine]) -> dict[str, Buckets]:
    """Return the buckets by model. Each draft size of an engine has its own bucket; n-gram drafts are rounded up."""
    target, limits, drafters = {1}, design.limits, design.drafters
    own: dict[str, Iterable[int]] = {}
    for drafter in drafters:
        if isinstance(drafter, HostDrafter):
            target.update(_doubled(1 + drafter.max_draft))
        else:
            target.add(drafter.tree.nodes)
            own[drafter.name] = _fed(drafter, drafters, keeps_levels=engines[drafter.name].keeps_levels)
    return {
        model: Buckets(
            new=tuple(size for size in sorted(sizes) if size <= limits[model][names.NEW]),
            view=view_buckets(design.target.view_bucket, limits[model][names.VIEW]),
            batch=batch_buckets(design.target.branches) if model == names.TARGET else (),
        )
        for model, sizes in {names.TARGET: target, **own}.items()
    }


def batch_buckets(sequences: int) -> tuple[int, ...]:
    """Return the sizes of steps of 2 to `sequences`: 2, 4, 8, then every eighth, and `sequences` itself."""
    sizes = {size for size in (2, 4, *range(8, sequences, 8)) if size < sequences}
    return tuple(sorted(sizes | {sequences})) if sequences > 1 else ()


def view_buckets(least: int, most: int) -> tuple[int, ...]:
    """Return views from `least` to `most`: powers of two and their midpoints, so that a view has at most half as many
    keys again as needed."""
    views, size = [], least
    while size < most:
        views.append(size)
        size += max(least, 1 << (size.bit_length() - 2))
    return (*views, most)


def _doubled(most: int) -> set[int]:
    """Return 2, 4, 8 and so on, and `most` itself; nothing for a `most` of 1."""
    return {min(1 << power, most) for power in range(1, most.bit_length() + 1)} if most > 1 else set()


def _fed(drafter: GraphDrafter, drafters: Sequence[Drafter], *, keeps_levels: bool) -> range:
    """Return the numbers of tokens that a drafter may have to compute in a round.

    Those are all tokens that the target committed, or, where KV of its levels is kept, those without KV; for a head
    also tokens that n-grams committed in its place.
    """
    keeps = drafter.kind == "model" and keeps_levels
    before = (d.max_draft for d in drafters if isinstance(d, HostDrafter) and d.otherwise == drafter.name)
    longest = max(drafter.longest_path, *before, 0) if drafter.reads_features else drafter.longest_path
    return range(1, 3 if keeps else 2 + longest)
