"""A lowered graph becomes launches: what each node is, and what must be in memory for the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.kernels.code import MOST_SOURCES, Nodes, TooLongError, count, sources, write
from outrider.compiler.kernels.sizes import Size, largest, product, quotient, size
from outrider.compiler.kernels.values import (
    Kind,
    PendingProduct,
    ProductInput,
    RuleTensor,
    Shape,
    Stored,
    Value,
    Weight,
)
from outrider.compiler.kernels.workspace import arrange
from outrider.compiler.models.config import WeightType
from outrider.plans import names
from outrider.plans.errors import CheckpointError, PlanError
from outrider.plans.kernel_engine import NO_TENSOR, KernelEngine, Launch, Loop, Place
from outrider.plugins.cuda.engine_kernels import ENGINE_KERNELS, FORMS, INTEGERS
from outrider.plugins.cuda.launches import THREADS
from outrider.plugins.quant_layout import BLOCK

_ITEM = {"real": 4, "integer": 8}
_MOST_KNOWN = 64  # elements of a small tensor that are known one by one
_MANY = MOST_SOURCES - 2  # tensors that a rule reads, so that what is made of it may read others
_LONG = 80  # operations of a rule that others are not made of: its elements are put into memory
_MOST_SPREAD = 1024  # blocks of a launch whose threads take as many elements as there are

Handler = Callable[["Emitter", ir.Node], None]


class Weights(Protocol):
    """A file of weights."""

    @property
    def name(self) -> str: ...

    def place(self, size: int, read: Callable[[], NDArray[np.generic]]) -> int:
        """Return the offset of `size` bytes, which may be read now or never."""
        ...


@dataclass(frozen=True)
class Cost:
    """What a launch does for a `part` of the model: the bytes that it moves, its operations; for the reader."""

    part: str
    moves: Size | str = "0"
    operations: Size | str = "0"


@dataclass
class _Items:
    """Launches so far; those within a loop are gathered apart."""

    done: list[Launch | Loop] = field(default_factory=list)
    within: list[Launch] | None = None


class Emitter:
    """Emits one engine. `handlers` say what to do with a node, by domain and operator."""

    def __init__(
        self,
        engine: str,
        graph: ir.Graph,
        limits: Mapping[str, int],
        weights: Weights,
        handlers: Mapping[tuple[str, str], Handler],
        dtype: WeightType = "float32",
    ) -> None:
        self.engine, self.graph, self.limits, self.dtype = engine, graph, limits, dtype
        self.nodes = Nodes()
        self._weights, self._handlers = weights, handlers
        self._values: dict[str, Value] = {}
        self._constants: dict[str, Place] = {}
        self._code: dict[tuple[int, ...], str] = {}
        self._areas: dict[str, int] = {}  # bytes at the largest
        self._counters: dict[str, Place] = {}
        self._items = _Items()
        self._made: dict[int, tuple[Value, Stored]] = {}  # by the identity of a value that was put into memory
        self._lengths: dict[int, tuple[Value, bool]] = {}
        self._weight_stores: dict[str, Stored] = {}
        self.shared: dict[str, Stored] = {}
        """What all layers of a pass share, by a key of who made it."""
        self.formed: dict[str, ProductInput] = {}
        """Tensors in other forms, by a key of who made them."""
        self._destinations = _destinations(graph)
        for each in (*graph.inputs, *graph.outputs):
            if each.dtype not in (ir.DataType.FLOAT, ir.DataType.INT64) and not _is_cache(_name(each)):
                raise self.refusal(f"{_name(each)} is of {each.dtype}, neither FLOAT nor INT64")
        for each in graph.inputs:
            self._values[_name(each)] = Stored(_name(each), _kind_of(each), shape_of(each))
        for name, constant in graph.initializers.items():
            tensor = constant.const_value
            assert tensor is not None
            self._values[name] = Weight(name, np.dtype(tensor.dtype.numpy()), tuple(tensor.shape.numpy()), tensor.numpy)

    # What handlers read.

    def value(self, each: ir.Value | None) -> Value:
        """Return what a value is; a product that waits for its reader is launched alone."""
        if (pending := self.pending(each)) is not None:
            pending.launch()
        assert each is not None
        return self._values[_name(each)]

    def pending(self, each: ir.Value | None) -> PendingProduct | None:
        """Return a value that is a product which waits for its reader; None of another."""
        value = None if each is None else self._values[_name(each)]
        return value if isinstance(value, PendingProduct) else None

    def known(self, each: ir.Value | None) -> tuple[Size, ...] | None:
        """Return the elements of a small tensor of integers that depends on sizes alone; None of another."""
        value = self.value(each)
        if isinstance(value, RuleTensor):
            return value.known
        if isinstance(value, Weight) and value.dtype.kind in "iub" and np.prod(value.shape) <= _MOST_KNOWN:
            return tuple(size(int(number)) for number in value.read().reshape(-1))
        return None

    def ruled(self, value: Value) -> RuleTensor:
        """Return a value by a rule for its elements: a tensor in memory is loaded from."""
        if isinstance(value, RuleTensor) and not self._is_long(value):
            return value
        if isinstance(value, Weight) and np.prod(value.shape) == 1:
            return self._single(value)
        stored = self.stored(value)
        real = stored.kind == "real"
        return RuleTensor(stored.kind, stored.shape, lambda index: self.nodes.load(stored.name, index, real=real))

    def _is_long(self, value: RuleTensor) -> bool:
        """Return whether the rule is better run once: what is made of its elements then loads them."""
        if id(value) not in self._lengths:
            made = value.at(self.nodes.index)
            self._lengths[id(value)] = value, count(made) > _LONG or len(sources(made)) > _MANY
        return self._lengths[id(value)][1]

    def _single(self, value: Weight) -> RuleTensor:
        number = value.read().reshape(-1)[0]
        node = self.nodes.real(float(number)) if value.dtype.kind == "f" else self.nodes.constant(int(number))
        kind: Kind = "real" if value.dtype.kind == "f" else "integer"
        return RuleTensor(kind, tuple(map(size, value.shape)), lambda index: node)

    def stored(self, value: Value) -> Stored:
        """Return a value in memory; it is written there once."""
        if isinstance(value, Stored):
            return value
        if isinstance(value, Weight):
            return self._weight(value)
        if not isinstance(value, RuleTensor):
            raise self.refusal(f"a {type(value).__name__} is read by an operator that it was not made for")
        if id(value) not in self._made:
            made = self.new(value.kind, value.shape)
            self.evaluate(value, made)
            self._made[id(value)] = (value, made)
        return self._made[id(value)][1]

    def set(self, output: ir.Value, value: Value) -> None:
        self._values[_name(output)] = value

    # What handlers write.

    def new(self, kind: Kind, shape: Shape, output: ir.Value | None = None, itemsize: int | None = None) -> Stored:
        """Return memory for a tensor: that of the engine's output that `output` becomes, or of the workspace."""
        name = None if output is None else self._destinations.pop(_name(output), None)
        if name is None:
            name = f"w{len(self._areas)}"
            elements = largest(product(shape), self.limits)
            self._areas[name] = max(elements, 1) * (itemsize or _ITEM[kind])
        return Stored(name, kind, shape)

    def new_formed(self, form: int, shape: Shape) -> ProductInput:
        """Return memory for a tensor in a form other than float32."""
        if form != INTEGERS:
            return ProductInput(self.new("real", shape, itemsize=2).name, form, shape)
        blocks = (product(shape[:-1]), size((shape[-1].number or 0) // BLOCK))
        scales, sums = (self.new("real", blocks).name for _ in range(2))
        return ProductInput(self.new("real", shape, itemsize=1).name, form, shape, scales, sums)

    def constant(self, name: str, size: int, read: Callable[[], NDArray[np.generic]]) -> str:
        """Put numbers of `size` bytes into the file of weights, and return the tensor's name."""
        if name not in self._constants:
            self._constants[name] = Place(offset=self._weights.place(size, read), size=size)
        return name

    def half_weight(self, weight: Weight, *, turned: bool) -> tuple[str, int]:
        """Return a matrix as `[outputs, inputs]` of the engine's type, a half, and the kernels' number of that type.

        `turned` says that it lies so already.
        """
        name = f"{weight.name}.{self.dtype}" + ("" if turned else ".turned")
        if name not in self._constants:
            self.constant(name, 2 * prod(weight.shape), lambda: self._halves(weight, turned=turned))
        return name, FORMS.index(self.dtype)

    def _halves(self, weight: Weight, *, turned: bool) -> NDArray[np.generic]:
        numbers = weight.read()
        with np.errstate(over="ignore"):
            halves = numbers.astype(np.float16 if self.dtype == "float16" else ml_dtypes.bfloat16)
        if np.isfinite(numbers).all() and not np.isfinite(halves).all():
            raise CheckpointError(f"{weight.name} has numbers that {self.dtype} has not; choose bfloat16 or float32")
        return halves if turned else halves.T

    def counter(self, name: str, size: int) -> str:
        """Return memory that is zero before the first launch, and that a kernel leaves zero."""
        if name not in self._counters:
            offset = max((place.offset + place.size for place in self._counters.values()), default=0)
            self._counters[name] = Place(offset=-(-offset // 16) * 16, size=size)
        return name

    def launch(
        self,
        kernel: str,
        tensors: Mapping[str, str | None],
        numbers: Mapping[str, Size | int | str],
        blocks: Size | str,
        cost: Cost,
        threads: int = THREADS,
        shared: int | str = 0,
    ) -> None:
        """Add a launch of one of `ENGINE_KERNELS`: all its parameters by name, None for a tensor that is left out.

        A block has `shared` bytes of dynamic shared memory. Nothing is added for "0" blocks.
        """
        if str(blocks) == "0":
            return
        spec = ENGINE_KERNELS[kernel]
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        missing = (set(spec.tensors) - spec.optional - set(given)) | (set(spec.numbers) ^ set(numbers))
        assert not missing, f"{kernel}: {missing}"
        assert set(given) <= set(spec.tensors), f"{kernel}: {given}"
        self.add(
            Launch(
                kernel=kernel,
                tensors=tuple(given.get(name, NO_TENSOR) for name in spec.tensors),
                numbers=tuple(str(numbers[name]) for name in spec.numbers),
                blocks=str(blocks), threads=threads, shared=str(shared),
                part=cost.part, moves=str(cost.moves), operations=str(cost.operations),
            )
        )  # fmt: skip

    def add(self, launch: Launch) -> None:
        """Add a launch of any kernel: `plugins.ops` has those of our ops."""
        if self._items.within is not None:
            self._items.within.append(launch)
        else:
            self._items.done.append(launch)

    def loop(self, times: str, body: Callable[[], None]) -> None:
        """Add the launches of `body` as a loop."""
        assert self._items.within is None
        self._items.within = []
        body()
        self._items.done.append(Loop(times=times, launches=tuple(self._items.within)))
        self._items.within = None

    def evaluate(self, value: RuleTensor, to: Stored) -> None:
        """Write every element of a value that is known by its rule."""
        try:
            code = write(value.at(self.nodes.index))
        except TooLongError as error:
            raise self.refusal(f"what makes {to.name} is too much for one launch: {error}") from None
        key = code.words
        if key not in self._code:
            words = np.array(code.words, np.int64)
            self._code[key] = self.constant(f"code.{len(self._code)}", words.nbytes, lambda: words)
        elements = product(to.shape)
        self.launch(
            "outrider_evaluate",
            {"to": to.name, "code": self._code[key]} | {f"source.{i}": name for i, name in enumerate(code.sources)},
            {
                "elements": elements,
                "length": len(code.words),
                "real": int(to.kind == "real"),
                **{symbol: symbol for symbol in names.SYMBOLS},
            },
            spread(elements),
            Cost("indices and small tensors", elements * _ITEM[to.kind]),
        )

    def refusal(self, reason: str) -> PlanError:
        return PlanError(
            f"the backend cuda has no kernels for the engine {self.engine!r}: {reason}; build it for another backend, "
            "such as onnxruntime-cuda"
        )

    # The engine.

    def emit(self) -> KernelEngine:
        """Emit all nodes, in their order. Raises `PlanError` for what has no kernel."""
        for node in self.graph:
            handler = self._handlers.get((node.domain, node.op_type))
            if handler is None:
                where = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
                raise self.refusal(f"its graph has the operator {where}")
            handler(self, node)
        for output in self.graph.outputs:
            self._put_out(output)
        items = tuple(self._items.done)
        offsets, total = arrange(items, self._areas)
        workspace = {name: Place(offset=offsets[name], size=area) for name, area in self._areas.items()}
        counters = max((place.offset + place.size for place in self._counters.values()), default=0)
        return KernelEngine(
            weights=self._weights.name,
            constants=self._constants,
            workspace=workspace,
            workspace_size=total,
            counters=self._counters,
            counters_size=counters,
            items=items,
        )

    def _put_out(self, output: ir.Value) -> None:
        """Write an output that no kernel has written in its place. A KV cache is in its place always."""
        name = _name(output)
        if _is_cache(name):
            return
        value = self.value(output)
        if isinstance(value, Stored) and value.name == name:
            return
        ruled = self.ruled(value)
        self.evaluate(ruled, Stored(name, ruled.kind, ruled.shape))

    def _weight(self, weight: Weight) -> Stored:
        if weight.name not in self._weight_stores:
            kind: Kind = "real" if weight.dtype.kind == "f" else "integer"
            if kind == "real" and weight.dtype != np.float32:
                raise self.refusal(f"{weight.name} is of {weight.dtype}")
            stored = np.float32 if kind == "real" else np.int64
            self.constant(
                weight.name,
                np.dtype(stored).itemsize * prod(weight.shape),
                lambda: weight.read().astype(stored, copy=False),
            )
            self._weight_stores[weight.name] = Stored(weight.name, kind, tuple(map(size, weight.shape)))
        return self._weight_stores[weight.name]


def spread(elements: Size, threads: int = THREADS) -> str:
    """Return the blocks of a launch whose threads go over `elements`, however many there are."""
    return f"min({quotient(elements, threads)}, {_MOST_SPREAD})"


def shape_of(value: ir.Value) -> Shape:
    assert value.shape is not None
    return tuple(size(d) if isinstance(d, int) else size(str(d.value)) for d in value.shape)


def _name(value: ir.Value) -> str:
    assert value.name
    return value.name


def _kind_of(value: ir.Value) -> Kind:
    return "integer" if value.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL) else "real"


def _is_cache(name: str) -> bool:
    return name.startswith(("k_cache.", "v_cache."))


def _destinations(graph: ir.Graph) -> dict[str, str]:
    """Return, by value, the output of the graph that it becomes by changes of shape alone."""
    found: dict[str, str] = {}
    for output in graph.outputs:
        value: ir.Value | None = output
        while value is not None and _name(value) not in found:
            found[_name(value)] = _name(output)
            producer = value.producer()
            if producer is None or producer.op_type not in ("Reshape", "Squeeze", "Unsqueeze"):
                break
            value = producer.inputs[0]
    for each in graph.inputs:
        found.pop(_name(each), None)
    return found
