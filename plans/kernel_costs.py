"""What the launches of an engine of the backend `cuda` read, write and compute in a step: known without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.plans.formulas import formula
from outrider.plans.kernel_engine import TURN, KernelEngine, Launch


@dataclass(frozen=True)
class LaunchCost:
    """One launch of a step: `moved` bytes are read and written at least, `operations` are additions and products. A
    block has `shared` bytes of dynamic shared memory."""

    launch: Launch
    blocks: int
    shared: int
    moved: int
    operations: int


def launch_costs(engine: KernelEngine, sizes: Mapping[str, int]) -> list[LaunchCost]:
    """Return the launches of a step of these sizes, in order; those of no blocks do not run."""
    found = list[LaunchCost]()
    for item in engine.items:
        launches = (item,) if isinstance(item, Launch) else item.launches
        turns = 1 if isinstance(item, Launch) else formula(item.times).value(sizes)
        for turn in range(turns):
            at = {**sizes, TURN: turn}
            for launch in launches:
                blocks = formula(launch.blocks).value(at)
                if blocks > 0:
                    texts = (launch.shared, launch.moves, launch.operations)
                    found.append(LaunchCost(launch, blocks, *(formula(text).value(at) for text in texts)))
    return found
