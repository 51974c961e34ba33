"""Step sizes that devices record: few, so that all can be recorded, and close, so that little padding is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outrider.compiler.design import PlanDesign
from outrider.plans import names
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import BatchSize, Buckets, Drafter, Engine, GraphDrafter, longest_draft

_FED = 8  # most tokens of each sequence for which a drafter has one size of step


def step_buckets(design: PlanDesign, engines: Mapping[str, Engine]) -> dict[str, Buckets]:
    """Return the buckets by model. Each draft size of an engine has its own bucket; n-gram drafts are rounded up."""
    target, limits, drafters = {1}, design.limits, design.drafters
    own: dict[str, Iterable[int]] = {}
    sequences = design.target.branches
    batch = {names.TARGET: _verified_batches(sequences, limits[names.TARGET], 1 + longest_draft(drafters))}
    for drafter in drafters:
        if isinstance(drafter, HostDrafter):
            target.update(_doubled(1 + drafter.max_draft))
        else:
            target.add(drafter.tree.nodes)
            own[drafter.name] = _fed(drafter, drafters, keeps_levels=engines[drafter.name].keeps_levels)
            fed = _fed(drafter, drafters, keeps_levels=False)[-1]  # of several sequences, KV of levels is not kept
            batch[drafter.name] = _drafted_batches(sequences, limits[drafter.name], fed)
    return {
        model: Buckets(
            new=tuple(size for size in sorted(sizes) if size <= limits[model][names.NEW]),
            view=view_buckets(design.target.view_bucket, limits[model][names.VIEW]),
            batch=batch[model],
        )
        for model, sizes in {names.TARGET: target, **own}.items()
    }


def _verified_batches(sequences: int, limits: Mapping[str, int], each: int) -> tuple[BatchSize, ...]:
    """Return the target's sizes: a token of each sequence, then tips with drafts, at most `each` of a sequence.

    Rows that a step has no sequence for are empty, and cost little: a size has as many as it may need.
    """
    if sequences == 1:
        return ()
    plain = [BatchSize(sequences=size, tokens=size, each=1) for size in batch_buckets(sequences)]
    drafted = [
        BatchSize(sequences=min(size, sequences), tokens=size, each=min(size, each))
        for size in batch_buckets(min(limits[names.LOGITS], sequences * each))[1:]  # from 3 tokens on
    ]
    return (*plain, *(drafted if each > 1 else ()))


def _drafted_batches(sequences: int, limits: Mapping[str, int], fed: int) -> tuple[BatchSize, ...]:
    """Return the sizes of a drafter whose sequences are fed at most `fed` tokens each.

    A tree grows for each of its rows, so that those are few; tokens that are fed cost it little.
    """
    shares = (fed,) if fed <= _FED else (_FED // 2, fed)
    return tuple(
        BatchSize(sequences=size, tokens=min(size * share, limits[names.NEW]), each=fed)
        for size in batch_buckets(sequences)
        for share in shares
    )


def batch_buckets(most: int) -> tuple[int, ...]:
    """Return 2, 4, 8 and so on, from 8 on with their midpoints, and `most` itself; nothing for a `most` of 1."""
    sizes = {size for size in (2, 4, *view_buckets(8, most)) if size < most}
    return tuple(sorted(sizes | {most})) if most > 1 else ()


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
