"""Which programs a plan has: those that the compiler writes, and the runtime looks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.plans import names
from outrider.plans.manifest import Drafter, Engine, GraphDrafter


@dataclass(frozen=True)
class ProgramKind:
    """The task of a program: commit a tree's tokens, or one token, or move slots; over the partial cache."""

    speculative: bool = False
    plain: bool = False
    compacting: bool = False
    partial: bool = False


def program_list(
    drafters: Sequence[Drafter], branches: int, engines: Mapping[str, Engine], *, partial: bool
) -> dict[str, ProgramKind]:
    """`prefill`, `decode`, `verify`, `beam`; `extend.NAME` for each drafter with an engine, and what drafts with it.

    `speculate.NAME` is one launch for one sequence: the drafter's engine writes its tree into the target's step, which
    is verified. `draft.NAME` drafts for several sequences. `compact.NAME` moves KV of a tree together, or of every
    model of a plan of several branches over dead slots. With partial KV, what commits tokens is there once more, over
    the partial cache, and `refresh` fills that.
    """
    committing = {names.DECODE: ProgramKind(plain=True), names.VERIFY: ProgramKind(speculative=True)}
    others = {names.PREFILL: ProgramKind(), names.BEAM: ProgramKind()}
    moves = ProgramKind(compacting=True)
    if branches > 1:
        others[names.compact(names.TARGET)] = moves
    for drafter in drafters:
        if not isinstance(drafter, GraphDrafter):
            continue
        name = drafter.name
        others[names.extend(name)] = ProgramKind()
        committing[names.speculate(name)] = ProgramKind(speculative=True)
        if branches > 1:
            others[names.draft(name)] = ProgramKind()
        if branches > 1 or (drafter.compacts and name in engines and engines[name].keeps_levels):
            others[names.compact(name)] = moves
    if partial:
        others[names.REFRESH] = ProgramKind()
        committing |= {
            names.partial(name): ProgramKind(kind.speculative, kind.plain, partial=True)
            for name, kind in committing.items()
        }
    return committing | others
