"""A TensorRT plugin as data: an op's kernel with its inputs, its outputs and a few 32-bit integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from outrider.plugins.cuda.launches import Launch, as_number, move_unit
from outrider.plugins.schema import SLOT, TensorSpec
from outrider.plugins.tensorrt.expressions import Arithmetic, Expression, Size, expression_of

NAMESPACE = "outrider"
SAME_SIZE = {"trees": "B", "cache_rows": "R"}
"""Sizes of launches that are, in an engine, another one: a tree for each sampling slot, as accepted_count has places;
the rows of a KV cache and of a step."""
BITS = {"float64": "int64", "uint64": "int64"}  # dtypes that TensorRT lacks, and the dtype that carries their bits

T = TypeVar("T")


@dataclass(frozen=True)
class Declined:
    """The reason why an op is not a plugin."""

    reason: str


@dataclass(frozen=True)
class PluginLaunch:
    """Blocks, threads per block, and the int32 arguments, in order."""

    blocks: Expression
    threads: int
    arguments: tuple[Expression, ...]


@dataclass(frozen=True)
class Plugin:
    """A plugin of TensorRT: `outrider::<name>`; in ONNX a node of domain `outrider` and op type `name`.

    The plugin's kernel takes the addresses of `inputs`, then `arguments` as int32, then the addresses of `outputs`: the
    order that TensorRT prescribes. `launch` has the op's kernel that it calls, and the numbers of blocks and threads.

    `attributes` are constants of the node, all of them required: ints, except those in `floats`. `derived` are sizes of
    outputs that no input has, computed from int attributes and, by what formulas know, from inputs' sizes.
    `stand_ins` are C++ expressions for tensors that the called kernel takes and the plugin lacks. `guard` is a C++
    condition on the parameters by name: where it does not hold, the plugin calls nothing. `extra` names sizes that only
    the guard needs. `aliased` maps an output to the input whose memory it shares. Sizes in `constants` are fixed when
    the engine is built.
    """

    name: str
    launch: Launch
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    guard: str = ""
    extra: tuple[str, ...] = ()
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    aliased: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()

    def kind(self, attribute: str) -> type[int] | type[float]:
        return float if attribute in self.floats else int

    @property
    def id(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def kernel(self) -> str:
        return f"{self.launch.kernel}_plugin"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the int32 arguments, each once: sizes by symbol, and attributes."""
        return tuple(dict.fromkeys((*(SAME_SIZE.get(name, name) for name in self.launch.numbers), *self.extra)))

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Where to read each size: the index of the first input that has the size, and the axis."""
        found: dict[str, tuple[int, int]] = {}
        for index, spec in enumerate(self.inputs):
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str):
                    found.setdefault(dim, (index, axis))
        return found

    def sizes(self, shapes: Sequence[Sequence[T]]) -> dict[str, T]:
        """Return sizes by symbol from the inputs' shapes. Raises ValueError for a wrong number or rank of inputs."""
        ranks = [len(spec.shape) for spec in self.inputs]
        if [len(shape) for shape in shapes] != ranks:
            raise ValueError(
                f"{self.id} takes inputs of ranks {ranks} ({', '.join(spec.name for spec in self.inputs)}), "
                f"not {[len(shape) for shape in shapes]}"
            )
        return {symbol: shapes[index][axis] for symbol, (index, axis) in self.axes.items()}

    def output_shapes(self, known: Mapping[str, Any], arithmetic: Arithmetic[Any]) -> list[tuple[Any, ...]]:
        """Return the shapes of the outputs in order, for `known`, which holds sizes and attributes."""
        formulas = {name: Size(name) if name in self.axes else value for name, value in known.items()}
        derived = {symbol: expression_of(size(formulas)) for symbol, size in self.derived.items()}
        sizes = dict(known) | {symbol: formula.value(known, arithmetic) for symbol, formula in derived.items()}
        return [tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape) for spec in self.outputs]

    def launch_for(self, known: Mapping[str, int | float]) -> PluginLaunch:
        """Return the launch for `known`: the attributes, the constants, and `itemsize` where there are constants.

        Raises ValueError for a missing value.
        """
        wanted = (*self.attributes, *self.constants, *(("itemsize",) if self.constants else ()))
        if missing := [name for name in wanted if name not in known]:
            raise ValueError(f"{self.id} is built for fixed {', '.join(wanted)}; missing: {', '.join(missing)}")
        sizes: dict[str, Expression | int] = {symbol: Size(symbol) for symbol in self.axes}
        fixed = {name: as_number(self.kind(name), known[name]) for name in wanted}
        if self.constants:
            unit = move_unit(fixed)
            fixed |= {"unit": unit, "units": fixed[SLOT] * fixed["itemsize"] // unit}
        sizes |= fixed
        blocks = cast("Callable[[Mapping[str, Expression | int]], Expression | int]", self.launch.blocks)
        threads = cast("Callable[[Mapping[str, Expression | int]], int]", self.launch.threads)
        return PluginLaunch(
            blocks=expression_of(blocks(sizes)),
            threads=threads(sizes),
            arguments=tuple(expression_of(sizes[name]) for name in self.arguments),
        )


def carried_as(spec: TensorSpec) -> tuple[str, ...]:
    """Return the dtypes that a tensor may have in an engine."""
    return tuple(BITS.get(dtype, dtype) for dtype in spec.dtype.split(" | "))
