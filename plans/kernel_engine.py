"""An engine of the backend `cuda`: a list of kernel launches over named memory. The file of such an engine is JSON.

A launch's kernel is in the plan's cubin. Its grid, its shared memory and the numbers that it is given are formulas over
the sizes of the step, so that one list serves a prompt, a decoded token and a draft tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from outrider.plans import names
from outrider.plans.buffers import Strict
from outrider.plans.formulas import formula

TURN = "turn"
"""The size that counts the turns of a `Loop`, from 0 on."""

NO_TENSOR = ""
"""In the place of a tensor: the kernel gets a null pointer."""

MOST_THREADS = 1024
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on the GPUs that have most."""
_MOST_BLOCKS = 2**31 - 1
_MOST_BYTES, _MOST_TURNS, _MOST_NUMBER = 2**48, 2**16, 2**63 - 1
_MAY_BE_NONE = (names.LOGITS, names.TIPS, names.GROWN)
_LEAST = {symbol: 0 if symbol in _MAY_BE_NONE else 1 for symbol in (*names.SYMBOLS, names.CAPACITY)}
_LEAST[names.ROW_EDGES] = 2
"""Least sizes of a step (`runtime.execution.step`): a prompt's chunk has no logits, and a target's step no tree."""


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
    launches: Annotated[tuple[Launch, ...], Field(min_length=1)]


Item = Launch | Loop


@dataclass(frozen=True)
class Parameters:
    """How many tensors and numbers a kernel takes. Tensors at the places `optional` may be left out, those at `written`
    are written to. A block has from `threads[0]` to `threads[1]` threads."""

    tensors: int
    numbers: int
    optional: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    threads: tuple[int, int] = (1, MOST_THREADS)


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
    engine: KernelEngine,
    bound: Collection[str],
    limits: Mapping[str, int],
    weights_size: int,
    kernels: Mapping[str, Parameters],
) -> Iterator[str]:
    """List faults of an engine, a clause each, before anything is launched.

    `bound` are names of the engine's inputs and outputs, `limits` the largest sizes of its model, `weights_size` the
    bytes of its file of weights, `kernels` the parameters of every kernel that there is. Formulas are evaluated at the
    smallest and at the largest sizes.
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
        for found in (_parameter_problems(launch, kernels, engine.constants), _formula_problems(launch, times, limits)):
            yield from (f"{where}: {problem}" for problem in found)


def _parameter_problems(launch: Launch, kernels: Mapping[str, Parameters], constants: Collection[str]) -> Iterator[str]:
    takes = kernels.get(launch.kernel)
    if takes is None:
        yield "there is no such kernel"
        return
    if (len(launch.tensors), len(launch.numbers)) != (takes.tensors, takes.numbers):
        yield (
            f"it has {len(launch.tensors)} tensors and {len(launch.numbers)} numbers, and the kernel takes "
            f"{takes.tensors} and {takes.numbers}"
        )
        return
    for place, name in enumerate(launch.tensors):
        if name == NO_TENSOR and place not in takes.optional:
            yield f"tensor {place} is left out, and the kernel needs it"
        if place in takes.written and name in constants:
            yield f"it writes to {name!r}, which all sessions read"
    least, most = takes.threads
    if not least <= launch.threads <= most or (least > 1 and launch.threads % 32):
        yield f"its blocks have {launch.threads} threads, and the kernel takes {least} to {most} in whole warps"


def _formula_problems(launch: Launch, times: str | None, limits: Mapping[str, int]) -> Iterator[str]:
    largest = {symbol: limits[symbol] for symbol in names.SYMBOLS} | {names.CAPACITY: limits[names.VIEW]}
    named = {name for _, text, _, _ in _bounds(launch) for name in formula(text).names}
    unknown = (named - {TURN} | (formula(times).names if times else set())) - set(largest)
    if unknown:
        yield f"its formulas name {', '.join(sorted(unknown))}, which is no size of a step"
    elif times is None and TURN in named:
        yield f"it names {TURN}, and stands in no loop"
    else:
        for which, sizes in (("smallest", _LEAST), ("largest", largest)):
            yield from (f"{problem} at the {which} sizes" for problem in _value_problems(launch, times, sizes))


def _bounds(launch: Launch) -> Iterator[tuple[str, str, int, int]]:
    """Yield what each formula of a launch is, its text, and the least and the largest value that it may have."""
    yield "its blocks", launch.blocks, 0, _MOST_BLOCKS
    yield "its bytes of shared memory", launch.shared, 0, MOST_SHARED
    yield "its bytes moved", launch.moves, 0, _MOST_NUMBER
    yield "its operations", launch.operations, 0, _MOST_NUMBER
    yield from (("one of its numbers", text, -_MOST_NUMBER, _MOST_NUMBER) for text in launch.numbers)


def _value_problems(launch: Launch, times: str | None, sizes: Mapping[str, int]) -> Iterator[str]:
    try:
        turns = 1 if times is None else formula(times).value(sizes)
        if not 0 <= turns <= _MOST_TURNS:
            yield f"{times!r}, the turns of its loop, is {turns}, not 0 to {_MOST_TURNS},"
            return
        for turn in sorted({0, turns - 1}) if turns else ():
            for what, text, least, most in _bounds(launch):
                value = formula(text).value({**sizes, TURN: turn})
                if not least <= value <= most:
                    yield f"{text!r}, {what}, is {value}, not {least} to {most},"
    except ValueError as error:
        yield str(error)
