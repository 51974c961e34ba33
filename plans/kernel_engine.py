"""An engine of the backend `cuda`: a list of kernel launches over named memory. The file of such an engine is JSON.

A launch's kernel is in the plan's cubin. Its grid, its shared memory and the numbers that it is given are formulas over
the sizes of the step, so that one list serves a prompt, a decoded token and a draft tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from plans import names
from plans.buffers import Strict
from plans.formulas import formula

TURN = "turn"
"""The size that counts the turns of a `Loop`, from 0 on."""

NO_TENSOR = ""
"""In the place of a tensor: the kernel gets a null pointer."""

MOST_THREADS = 1024
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on the GPUs that have most."""
_MOST_BLOCKS = 2**31 - 1
_MOST_BYTES, _MOST_TURNS = 2**48, 2**16


def _readable(text: str) -> str:
    formula(text)
    return text


FormulaText = Annotated[str, Field(max_length=500), AfterValidator(_readable)]
Bytes = Annotated[int, Field(ge=0, lt=_MOST_BYTES)]


class Place(Strict):
    """Bytes in a file of weights, or in the memory that a session keeps for its engines."""

    offset: Bytes
    size: Bytes


class Launch(Strict):
    """One launch. Parameters of a kernel are addresses of `tensors`, then `numbers`, int64 each.

    `tensors` are inputs and outputs of the engine, constants, and places of the workspace, by name. `part` says which
    part of the model it computes, `moves` how many bytes it reads and writes at least, and `operations` how many
    additions and multiplications it has; `outrider inspect` shows all three.
    """

    kernel: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    tensors: tuple[str, ...]
    numbers: tuple[FormulaText, ...] = ()
    blocks: FormulaText
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)]
    shared: FormulaText = "0"
    part: str = ""
    moves: FormulaText = "0"
    operations: FormulaText = "0"


class Loop(Strict):
    """Launches that run one after another as often as `times` says; their formulas may name `TURN`."""

    times: FormulaText
    launches: tuple[Launch, ...]


Item = Launch | Loop


class KernelEngine(Strict):
    """The content of an engine's file. `weights` is a file beside it, `constants` are places in it.

    `workspace` are places in memory of `workspace_size` bytes that all engines of a session share: nothing stays there
    between two engines. `counters` are places in memory that is zero before the first launch; kernels leave it zero.
    """

    weights: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    constants: dict[str, Place]
    workspace: dict[str, Place]
    workspace_size: Bytes
    counters: dict[str, Place] = Field({})
    counters_size: Bytes = 0
    items: tuple[Item, ...]

    def launches(self) -> Iterator[tuple[Launch, str | None]]:
        """Yield every launch, with the formula of the turns of its loop; None for one that stands in none."""
        for item in self.items:
            if isinstance(item, Launch):
                yield item, None
            else:
                yield from ((launch, item.times) for launch in item.launches)


def problems(
    engine: KernelEngine, bound: Collection[str], limits: Mapping[str, int], weights_size: int
) -> Iterator[str]:
    """List faults of an engine, a clause each, before anything is launched.

    `bound` are names of the engine's inputs and outputs, `limits` the largest sizes of its model, `weights_size` the
    bytes of its file of weights.
    """
    named = [engine.constants, engine.workspace, engine.counters]
    for places, size, what in zip(
        named, (weights_size, engine.workspace_size, engine.counters_size), ("weights", "workspace", "counters"),
        strict=True,
    ):  # fmt: skip
        for name, place in places.items():
            if place.offset % 16:
                yield f"{name!r} does not begin at a multiple of 16 bytes"
            if place.offset + place.size > size:
                yield f"{name!r} ends at byte {place.offset + place.size} of the {what}, which have {size}"
    taken = list(bound) + [name for places in named for name in places]
    if len(set(taken)) < len(taken) or NO_TENSOR in taken:
        yield "two tensors have one name, or one has none"
    known = set(taken) | {NO_TENSOR}
    for number, (launch, times) in enumerate(engine.launches()):
        where = f"launch {number}, {launch.kernel!r}"
        for name in launch.tensors:
            if name not in known:
                yield f"{where}: there is no tensor {name!r}"
        yield from (f"{where}: {problem}" for problem in _launch_problems(launch, times, limits))


def _launch_problems(launch: Launch, times: str | None, limits: Mapping[str, int]) -> Iterator[str]:
    sizes = {symbol: limits[symbol] for symbol in names.SYMBOLS}
    sizes[names.CAPACITY] = 1
    texts = (launch.blocks, launch.shared, *launch.numbers, launch.moves, launch.operations)
    named = {name for text in texts for name in formula(text).names}
    unknown = (named - {TURN} | (formula(times).names if times else set())) - set(sizes)
    if unknown:
        yield f"its formulas name {', '.join(sorted(unknown))}, which is no size of a step"
        return
    if times is None and TURN in named:
        yield f"it names {TURN}, and stands in no loop"
        return
    try:
        turns = formula(times).value(sizes) if times else 1
        if turns > _MOST_TURNS:
            yield f"{times!r} turns of a loop are more than {_MOST_TURNS}"
        for turn in sorted({0, max(turns - 1, 0)}):
            at = sizes | {TURN: turn}
            if not 0 <= formula(launch.blocks).value(at) <= _MOST_BLOCKS:
                yield f"{launch.blocks!r} blocks are no grid at the largest sizes"
            if not 0 <= formula(launch.shared).value(at) <= MOST_SHARED:
                yield f"{launch.shared!r} bytes of shared memory are more than a block may have"
            for text in launch.numbers:
                formula(text).value(at)
    except ValueError as error:
        yield str(error)
