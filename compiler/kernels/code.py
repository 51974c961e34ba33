"""Code of the kernel `outrider_evaluate`: how one element of a tensor is made of others, as postfix words.

A `Node` is an operation on others; equal nodes are one object, so that what is used twice is computed once.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from outrider.compiler.kernels.sizes import Size
from outrider.plans import names


class Word(IntEnum):
    """The words of `csrc/cuda/engine/evaluate.cu.h`, in its order."""

    INDEX = 0
    CONSTANT = auto()
    SIZE = auto()
    LOAD_INTEGER = auto()
    LOAD_REAL = auto()
    KEEP = auto()
    KEPT = auto()
    ADD = auto()
    SUBTRACT = auto()
    MULTIPLY = auto()
    DIVIDE = auto()
    MODULO = auto()
    LESS = auto()
    EQUAL = auto()
    AND = auto()
    CHOOSE = auto()
    ADD_REAL = auto()
    SUBTRACT_REAL = auto()
    MULTIPLY_REAL = auto()
    DIVIDE_REAL = auto()
    NEGATE_REAL = auto()
    LOG_REAL = auto()
    SHARE_REAL = auto()
    CAP_REAL = auto()
    TO_REAL = auto()
    TO_INTEGER = auto()
    TO_TRUTH = auto()


MOST_SOURCES, MOST_KEPT, MOST_STACK = 8, 32, 64
"""What the kernel has room for."""


@dataclass(frozen=True, eq=False)
class Node:
    """An operation. `of` is the number of a constant, the tensor of a load, or the symbol of a size."""

    word: Word
    operands: tuple[Node, ...] = ()
    of: int | str = 0


class Nodes:
    """Makes nodes, each only once, and folds what is known."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Node] = {}
        self.index = self._make(Word.INDEX)

    def constant(self, number: int) -> Node:
        return self._make(Word.CONSTANT, of=number)

    def real(self, number: float) -> Node:
        """Return a float32, as its bits."""
        return self.constant(int(struct.unpack("<I", struct.pack("<f", number))[0]))

    def size(self, value: Size) -> Node:
        total = self.constant(0)
        for monomial, factor in value.terms:
            term = self.constant(factor)
            for symbol in monomial:
                term = self.apply(Word.MULTIPLY, term, self._make(Word.SIZE, of=symbol))
            total = self.apply(Word.ADD, total, term)
        return total

    def load(self, tensor: str, index: Node, *, real: bool) -> Node:
        return self._make(Word.LOAD_REAL if real else Word.LOAD_INTEGER, (index,), tensor)

    def clamp(self, place: Node, length: Node) -> Node:
        """Return a place in a dimension: one below 0 counts from the end; what is read of data may be anything, and one
        that is out of range becomes 0."""
        if place.word is not Word.CONSTANT and not _reads(place):
            return place
        place = self.apply(
            Word.CHOOSE, self.apply(Word.LESS, place, self.constant(0)), self.apply(Word.ADD, place, length), place
        )
        if place.word is Word.CONSTANT or not _reads(place):
            return place
        fits = self.apply(
            Word.AND, self.apply(Word.LESS, self.constant(-1), place), self.apply(Word.LESS, place, length)
        )
        return self.apply(Word.CHOOSE, fits, place, self.constant(0))

    def apply(self, word: Word, *operands: Node) -> Node:
        if word is Word.CHOOSE and operands[0].word is Word.CONSTANT:
            return operands[1] if operands[0].of else operands[2]
        if len(operands) == 2:
            folded = self._folded(word, *operands)
            if folded is not None:
                return folded
        return self._make(word, operands)

    def _folded(self, word: Word, a: Node, b: Node) -> Node | None:
        x, y = (each.of if each.word is Word.CONSTANT else None for each in (a, b))
        if isinstance(x, int) and isinstance(y, int):
            match word:
                case Word.ADD:
                    return self.constant(x + y)
                case Word.SUBTRACT:
                    return self.constant(x - y)
                case Word.MULTIPLY:
                    return self.constant(x * y)
                case Word.LESS:
                    return self.constant(int(x < y))
        if word is Word.ADD and x == 0:
            return b
        if word in (Word.ADD, Word.SUBTRACT) and y == 0:
            return a
        if word is Word.MULTIPLY and 0 in (x, y):
            return self.constant(0)
        if word is Word.MULTIPLY and x == 1:
            return b
        if word in (Word.MULTIPLY, Word.DIVIDE) and y == 1:
            return a
        return self.constant(0) if word is Word.MODULO and y == 1 else None

    def _make(self, word: Word, operands: Sequence[Node] = (), of: int | str = 0) -> Node:
        key = (word, of, *map(id, operands))
        if key not in self._made:
            self._made[key] = Node(word, tuple(operands), of)
        return self._made[key]


def _reads(node: Node) -> bool:
    return node.word in (Word.LOAD_INTEGER, Word.LOAD_REAL) or any(map(_reads, node.operands))


@dataclass(frozen=True)
class Code:
    """Words that leave an element on the stack, and the tensors that they load from, by number."""

    words: tuple[int, ...]
    sources: tuple[str, ...]


class TooLongError(Exception):
    """Code that the kernel has no room for."""


def count(result: Node) -> int:
    """Return how many operations a result takes."""
    return len(_uses(result)) + 1


def sources(result: Node) -> set[str]:
    """Return the names of the tensors that a result is loaded from."""
    return {str(node.of) for node in _parts(result) if node.word in (Word.LOAD_INTEGER, Word.LOAD_REAL)}


def write(result: Node) -> Code:
    """Write the code of `result`. Raises `TooLongError`."""
    return _Writer(_uses(result)).write(result)


def _parts(result: Node) -> Iterator[Node]:
    """Yield every operation that `result` is made of, itself among them, once."""
    seen, waiting = set[int](), [result]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            waiting += node.operands
            yield node


def _uses(result: Node) -> Counter[int]:
    """Count, by the identity of a node, the operations that `result` takes which read it."""
    return Counter(id(operand) for node in _parts(result) for operand in node.operands)


class _Writer:
    def __init__(self, uses: Counter[int]) -> None:
        self._left = uses  # uses of each node that are still to come
        self._places: dict[int, int] = {}
        self._free = list(range(MOST_KEPT))[::-1]
        self._words, self._sources = list[int](), list[str]()
        self._depth = 0

    def write(self, result: Node) -> Code:
        self._emit(result)
        if len(self._sources) > MOST_SOURCES:
            raise TooLongError(f"it reads {len(self._sources)} tensors")
        return Code(tuple(self._words), tuple(self._sources))

    def _emit(self, node: Node) -> None:
        if (place := self._places.get(id(node))) is not None:
            self._push(Word.KEPT, place)
            self._used(node)
            return
        for operand in node.operands:
            self._emit(operand)
        self._depth -= len(node.operands)
        match node.word:
            case Word.INDEX:
                self._push(node.word)
            case Word.CONSTANT:
                self._push(node.word, int(node.of))
            case Word.SIZE:
                self._push(node.word, names.SYMBOLS.index(str(node.of)))
            case Word.LOAD_INTEGER | Word.LOAD_REAL:
                self._push(node.word, self._source(str(node.of)))
            case _:
                self._push(node.word)
        if self._left[id(node)] > 1 and node.operands:
            if not self._free:
                raise TooLongError("it has more parts that are used twice than there is room for")
            self._places[id(node)] = self._free.pop()
            self._words += [Word.KEEP, self._places[id(node)]]
        self._used(node)

    def _used(self, node: Node) -> None:
        self._left[id(node)] -= 1
        if self._left[id(node)] == 0 and id(node) in self._places:
            self._free.append(self._places[id(node)])  # what was kept stays readable up to here

    def _push(self, *words: int) -> None:
        self._words += words
        self._depth += 1
        if self._depth > MOST_STACK:
            raise TooLongError("it is too deep")

    def _source(self, tensor: str) -> int:
        if tensor not in self._sources:
            self._sources.append(tensor)
        return self._sources.index(tensor)
