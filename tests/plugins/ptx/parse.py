"""PTX as data: functions, their memory, and their statements. Only as much of PTX as NVRTC makes of our kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = r"[\w$%]+"
_SPACE = re.compile(rf"\.(shared|local|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({_NAME})(?:\[(\d*)\])?")
_VARIABLE = re.compile(
    rf"\.(?:global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({_NAME})(?:\[(\d+)\])?(?:\s*=\s*([^;]+))?;"
)
_REGISTERS = re.compile(rf"\.reg\s+\.(\w+)\s+({_NAME})(?:<(\d+)>)?")
_FUNCTION = re.compile(
    rf"\.(entry|func)\s*(?:\(([^)]*)\))?\s*({_NAME})\s*\(([^)]*)\)([^{{;]*)([{{;])", re.MULTILINE
)  # kind, result, name, parameters, directives, start of the body or end of a declaration


class UnknownPtxError(Exception):
    """PTX that nobody has taught the translator."""


def bytes_of(ptx_type: str) -> int:
    """Return the size of a type, such as 4 of `f32`."""
    return int(re.sub(r"\D", "", ptx_type)) // 8


@dataclass(frozen=True)
class Memory:
    """A variable in the memory of a block, of a thread or of a call."""

    name: str
    size: int  # 0: what a launch gives a block
    align: int


@dataclass(frozen=True)
class Variable:
    """A variable of all threads, such as a constant that a source names. Without `values` it is zeros."""

    name: str
    type: str
    count: int
    align: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands;` with the parts of the opcode apart: `add.rn.f32` is ("add", "rn", "f32")."""

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str = ""

    @property
    def text(self) -> str:
        return f"{self.guard} {'.'.join(self.opcode)} {', '.join(self.operands)};".strip()

    @property
    def type(self) -> str:
        """The last part: of most instructions the type that they work on."""
        return self.opcode[-1]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Scope:
    """The begin or the end of a block of statements with names of its own."""

    opens: bool


@dataclass(frozen=True)
class CallMemory:
    """A parameter or a result of a call, which lives in the scope around it."""

    memory: Memory


Statement = Instruction | Label | Scope | CallMemory


@dataclass
class Function:
    """A kernel (`entry`) or a function that kernels call."""

    name: str
    entry: bool
    parameters: tuple[str, ...]
    result: str
    registers: dict[str, str] = field(default_factory=dict)  # name: type
    local: list[Memory] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)


@dataclass
class Module:
    shared: list[Memory] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)


def parse(ptx: str) -> Module:
    """Parse a module. Raises UnknownPtxError for a directive that is not known."""
    text = re.sub(r"//[^\n]*", "", ptx)
    module, position = Module(), 0
    while found := _FUNCTION.search(text, position):
        module.shared += [_memory(m) for m in _SPACE.finditer(text, position, found.start()) if m[1] == "shared"]
        module.variables += map(_variable, _VARIABLE.finditer(text, position, found.start()))
        position = found.end()
        if found[6] == ";":
            continue
        end = _end_of_body(text, position)
        names = tuple(m[4] for m in _SPACE.finditer(found[4]))
        result = next((m[4] for m in _SPACE.finditer(found[2] or "")), "")
        function = Function(found[3], found[1] == "entry", names, result)
        _read_body(text[position:end], function, module)
        module.functions.append(function)
        position = end
    return module


def _memory(match: re.Match[str]) -> Memory:
    size = bytes_of(match[3])
    return Memory(match[4], size * (1 if match[5] is None else int(match[5] or 0)), int(match[2] or size))


def _variable(match: re.Match[str]) -> Variable:
    values = tuple(_operands((match[5] or "").strip("{} \n")))
    return Variable(match[3], match[2], int(match[4] or 1), int(match[1] or bytes_of(match[2])), values)


def _end_of_body(text: str, position: int) -> int:
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
    return position - 1


def _lines(body: str) -> Iterator[str]:
    """Statements, labels and braces, one by one: calls have several lines."""
    pending = ""
    for line in map(str.strip, body.splitlines()):
        if not line:
            continue
        if not pending and (line in "{}" or line.endswith(":")):
            yield line
            continue
        pending = f"{pending} {line}".strip()
        if pending.endswith(";"):
            yield pending[:-1].strip()
            pending = ""


def _read_body(body: str, function: Function, module: Module) -> None:
    for line in _lines(body):
        if line in "{}":
            function.statements.append(Scope(line == "{"))
        elif line.endswith(":"):
            function.statements.append(Label(line[:-1]))
        elif found := _REGISTERS.fullmatch(line):
            names = [f"{found[2]}{i}" for i in range(int(found[3]))] if found[3] else [found[2]]
            function.registers |= dict.fromkeys(names, found[1])
        elif found := _SPACE.fullmatch(line):
            _declare(found, function, module)
        elif line.startswith("."):
            if line.split()[0] not in (".pragma", ".loc"):
                raise UnknownPtxError(f"the directive {line!r} of {function.name} is not known")
        else:
            function.statements.append(_instruction(line))


def _declare(found: re.Match[str], function: Function, module: Module) -> None:
    memory = _memory(found)
    if found[1] == "shared":
        module.shared.append(memory)
    elif found[1] == "local":
        function.local.append(memory)
    else:
        function.statements.append(CallMemory(memory))


def _instruction(line: str) -> Instruction:
    guard = ""
    if line.startswith("@"):
        guard, line = line.split(None, 1)
    opcode, _, rest = line.partition(" ")
    return Instruction(tuple(opcode.split(".")), tuple(_operands(rest)), guard)


def _operands(text: str) -> Iterator[str]:
    """Split at commas, but not within [address], {vector} or (list of parameters)."""
    depth, operand = 0, ""
    for character in text:
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield operand.strip()
            operand = ""
        else:
            operand += character
    if operand.strip():
        yield operand.strip()
