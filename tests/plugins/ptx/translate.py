"""PTX functions as C++ functions: an instruction becomes a statement."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.plugins.ptx.parse import CallMemory, Function, Instruction, Label, Module, Scope, UnknownPtxError, bytes_of

TYPES = {
    "pred": "bool", "f32": "float", "f64": "double",
    **{f"{sign}{bits}": f"{name}{bits}_t" for bits in (8, 16, 32, 64)
       for sign, name in (("u", "uint"), ("b", "uint"), ("s", "int"))},
}  # fmt: skip
_SPACES = {
    "shared": "Space::kShared",
    "global": "Space::kGlobal",
    "local": "Space::kPrivate",
    "param": "Space::kPrivate",
}
_SPECIAL = {
    "%tid.x": "machine.place().thread", "%ntid.x": "machine.place().threads", "%ctaid.x": "machine.place().block",
    "%nctaid.x": "machine.place().blocks", "%laneid": "machine.place().lane()",
}  # fmt: skip
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SIMPLE = {
    "add": "{} + {}", "sub": "{} - {}", "neg": "-{}", "fma": "std::fma({}, {}, {})", "rem": "remainder({}, {})",
    "rcp": "1 / {}", "min": "least({}, {})", "max": "largest({}, {})", "and": "{} & {}", "or": "{} | {}",
    "xor": "{} ^ {}",
}  # fmt: skip
"""Operations whose result has a single form; additions and negations wrap around."""
_CONVERSIONS = {  # opcode: the type of the operand, and what converts it
    "cvt.f32.f16": ("b16", "float_of_half"),
    "cvt.rn.f16.f32": ("f32", "half_of"),
    "cvt.rn.bf16.f32": ("f32", "bfloat_of"),
    "cvt.rni.f32.f32": ("f32", "std::nearbyint"),
}
_OTHER_ROUNDING = {"rz", "rm", "rp", "rni", "rmi", "rpi", "sat", "ftz"}
_MATRICES = {
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": "Bytes",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "Halves",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "Bfloats",
}
_OTHER_LANES = {"shfl.sync.idx.b32": "{}", "shfl.sync.bfly.b32": "machine.place().lane() ^ {}"}
_SITE = "__COUNTER__"  # of a collective, to the same of which all lanes of a warp come, of a barrier, or of a fence


def translate(module: Module) -> str:
    """Return the functions of `module` as C++, and the table of its kernels.

    Raises UnknownPtxError, with what nobody has taught the translator.
    """
    offsets, end = {}, 0
    for memory in sorted(module.shared, key=lambda known: known.size == 0):  # what a launch gives lies after the rest
        end = -(-end // memory.align) * memory.align
        offsets[memory.name] = end
        end += memory.size
    variables = "".join(
        f"alignas({v.align}) {TYPES[v.type]} {_identifier(v.name)}[{v.count}] = "
        f"{{{', '.join(_number(value, v.type) for value in v.values)}}};\n"
        for v in module.variables
    )
    names = {function.name for function in module.functions}
    declared = "".join(f"void {_identifier(name)}(char* result, char** parameters);\n" for name in sorted(names))
    bodies = "\n".join(_Body(function, module, offsets, names).code() for function in module.functions)
    kernels = ", ".join(
        f'{{"{function.name}", {{{_identifier(function.name)}, {len(function.parameters)}}}}}'
        for function in module.functions
        if function.entry
    )
    return (
        '#include "machine.h"\n\nnamespace ptx {\nnamespace {\n\n'
        f"constexpr size_t kSharedBytes = {end};\n{variables}{declared}\n"
        f'{bodies}\n}}  // namespace\n}}  // namespace ptx\n\n#define PTX_KERNELS {kernels}\n#include "library.h"\n'
    )


def _identifier(name: str) -> str:
    return "f_" + re.sub(r"\W", "_", name)


def _register(name: str) -> str:
    return "r_" + re.sub(r"\W", "_", name.lstrip("%"))


def _number(text: str, ptx_type: str) -> str:
    """A number as C++, or nothing where the text is none."""
    if found := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", text):
        return f"bits_as<float>(0x{found[1]}u)"
    if found := re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", text):
        return f"bits_as<double>(uint64_t{{0x{found[1]}ull}})"
    if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return f"static_cast<{TYPES[ptx_type]}>(uint64_t{{{int(text.rstrip('U'), 0) % 2**64}ull}})"
    return ""


def _unsigned(ptx_type: str) -> str:
    """The type in which overflow wraps around."""
    return ptx_type.replace("s", "u") if ptx_type[0] == "s" else ptx_type


class _Body:
    def __init__(self, function: Function, module: Module, shared: dict[str, int], names: set[str]) -> None:
        self._function, self._shared, self._names = function, shared, names
        self._memory = {
            *(memory.name for memory in function.local),
            *(variable.name for variable in module.variables),
            *(s.memory.name for s in function.statements if isinstance(s, CallMemory)),
        }

    def code(self) -> str:
        function = self._function
        lines = [
            f"void {_identifier(function.name)}(char* result, char** parameters) {{",
            "  (void)result, (void)parameters;",
        ]
        lines += [f"  {TYPES[kind]} {_register(name)} = {{}};" for name, kind in function.registers.items()]
        lines += [f"  alignas({m.align}) char {_identifier(m.name)}[{m.size}];" for m in function.local]
        for statement in function.statements:
            if isinstance(statement, Label):
                lines.append(f"{_identifier(statement.name)}:;")
            elif isinstance(statement, Scope):
                lines.append("{" if statement.opens else "}")
            elif isinstance(statement, CallMemory):
                memory = statement.memory
                lines.append(f"  alignas({memory.align}) char {_identifier(memory.name)}[{memory.size}];")
            else:
                lines.append(f"  {self._guarded(statement)}")
        return "\n".join([*lines, "}", ""])

    def _guarded(self, instruction: Instruction) -> str:
        name = instruction.opcode[0]
        if name in _SIMPLE:
            wraps = name in ("add", "sub", "neg")
            ptx_type = _unsigned(instruction.type) if wraps else instruction.type
            code = self._operation(instruction, _SIMPLE[name].format, ptx_type)
        else:
            code = getattr(self, f"_{name}", lambda instruction: None)(instruction)
        if code is None:
            raise UnknownPtxError(
                f"nobody has taught the translator {'.'.join(instruction.opcode)} ({instruction.text} in "
                f"{self._function.name})"
            )
        if not instruction.guard:
            return str(code)
        negated = "!" if instruction.guard[1] == "!" else ""
        return f"if ({negated}{_register(instruction.guard.lstrip('@!'))}) {{ {code} }}"

    # Operands.

    def _value(self, operand: str, ptx_type: str) -> str:
        kind = TYPES[ptx_type]
        if operand in self._function.registers:
            plain = TYPES[self._function.registers[operand]] == kind  # a call that does nothing takes long to compile
            return _register(operand) if plain else f"as<{kind}>({_register(operand)})"
        if operand in _SPECIAL:
            return f"static_cast<{kind}>({_SPECIAL[operand]})"
        if number := _number(operand, ptx_type):
            return number
        if operand in self._shared:
            return f"static_cast<{kind}>({self._shared[operand]})"
        if operand in self._memory:
            return f"static_cast<{kind}>(address_of({_identifier(operand)}))"
        raise UnknownPtxError(f"the operand {operand!r} in {self._function.name} is not known")

    def _address(self, operand: str) -> str:
        base, _, offset = operand.strip("[]").partition("+")
        shift = f" + static_cast<uint64_t>({int(offset)}ll)" if offset else ""
        if base == self._function.result:
            return f"address_of(result){shift}"
        if base in self._function.parameters:
            return f"address_of(parameters[{self._function.parameters.index(base)}]){shift}"
        wide = self._function.registers.get(base, "b64")
        return f"uint64_t{{{self._value(base, 'b32' if bytes_of(wide) == 4 else 'b64')}}}{shift}"

    def _set(self, to: str, value: str) -> str:
        kind = TYPES[self._function.registers[to]] if to in self._function.registers else ""
        if value.startswith(tuple(f"{maker}<{kind}" for maker in ("static_cast", "bits_as", "load", "as"))):
            return f"{_register(to)} = {value};"
        return f"set({_register(to)}, {value});"

    def _elements(self, operand: str) -> list[str]:
        return [part.strip() for part in operand.strip("{}").split(",")]

    def _space(self, instruction: Instruction) -> str:
        return next((_SPACES[part] for part in instruction.opcode if part in _SPACES), _SPACES["global"])

    def _operation(self, instruction: Instruction, value: Callable[..., str], ptx_type: str = "") -> str:
        """The result of `value`, called with the operands."""
        kind = ptx_type or instruction.type
        given = [self._value(operand, kind) for operand in instruction.operands[1:]]
        return self._set(instruction.operands[0], f"static_cast<{TYPES[kind]}>({value(*given)})")

    # Memory.

    def _ld(self, i: Instruction) -> str:
        elements, size = self._elements(i.operands[0]), bytes_of(i.type)
        whole = len(elements) * size
        address, space = self._address(i.operands[1]), self._space(i)
        loads = [
            self._set(element, f"load<{TYPES[i.type]}, {space}>(from + {n * size}, {whole if n == 0 else size})")
            for n, element in enumerate(elements)
        ]
        return f"{{ const uint64_t from = {address}; {' '.join(loads)} }}"

    def _st(self, i: Instruction) -> str:
        size, address = bytes_of(i.type), self._address(i.operands[0])
        return " ".join(
            f"store<{TYPES[i.type]}, {self._space(i)}>({address} + {n * size}, {self._value(element, i.type)});"
            for n, element in enumerate(self._elements(i.operands[1]))
        )

    def _atom(self, i: Instruction) -> str | None:
        if "add" not in i.opcode:
            return None
        added = f"add_atomically<{TYPES[i.type]}, {self._space(i)}>"
        return self._set(
            i.operands[0], f"{added}({self._address(i.operands[1])}, {self._value(i.operands[2], i.type)})"
        )

    def _cp(self, i: Instruction) -> str | None:
        how = i.opcode[1:]
        if how in (("async", "cg", "shared", "global"), ("async", "ca", "shared", "global")):
            to, source, size = i.operands
            return f"machine.start_copy({self._address(to)}, {self._address(source)}, {int(size)});"
        if how == ("async", "commit_group"):
            return "machine.copies.close(machine.place());"
        return f"machine.wait_for_copies({int(i.operands[0])});" if how == ("async", "wait_group") else None

    def _membar(self, i: Instruction) -> str:
        return f"machine.fence({_SITE});"

    _fence = _membar

    def _griddepcontrol(self, i: Instruction) -> str:
        return "" if "launch_dependents" in i.opcode else f"machine.wait_for_earlier({_SITE});"

    def _bar(self, i: Instruction) -> str | None:
        if i.opcode == ("bar", "warp", "sync"):
            return f"machine.wait_for_warp({_SITE}, {self._value(i.operands[0], 'b32')});"
        return f"machine.wait_for_block({_SITE});" if (i.opcode, i.operands) == (("bar", "sync"), ("0",)) else None

    # Of a warp.

    def _shfl(self, i: Instruction) -> str | None:
        lane = _OTHER_LANES.get(".".join(i.opcode))
        if lane is None:
            return None
        to, _, in_range = i.operands[0].partition("|")
        value, by, clamp, members = (self._value(operand, "b32") for operand in i.operands[1:])
        shuffled = f"machine.shuffled({_SITE}, {value}, {lane.format(by)}, {clamp}, {members})"
        return self._set(to, shuffled) + (self._set(in_range, "true") if in_range else "")

    def _mma(self, i: Instruction) -> str | None:
        kind = _MATRICES.get(".".join(i.opcode))
        if kind is None:
            return None
        to, a, b, c = map(self._elements, i.operands)
        own = ", ".join(self._value(register, "b32") for register in (*a, *b))
        sums = ", ".join(self._value(register, i.type) for register in c)
        lanes = f"machine.grid.exchange({_SITE}, {{{{{own}}}}})"
        added = f"emulator::add_products<emulator::{kind}>(sums, {lanes}, machine.place().lane());"
        results = " ".join(self._set(register, f"sums[{n}]") for n, register in enumerate(to))
        return f"{{ {TYPES[i.type]} sums[] = {{{sums}}}; {added} {results} }}"

    # Control.

    def _bra(self, i: Instruction) -> str:
        return f"goto {_identifier(i.operands[0])};"

    def _ret(self, i: Instruction) -> str:
        return "return;"

    def _call(self, i: Instruction) -> str:
        groups = [operand for operand in i.operands if operand.startswith("(")]
        (name,) = (operand for operand in i.operands if operand in self._names)
        returns = i.operands[0].startswith("(")
        given = [part.strip() for part in groups[-1].strip("() ").split(",")]
        result = _identifier(groups[0].strip("() ")) if returns else "nullptr"
        listed = ", ".join(_identifier(part) for part in given)
        return f"{{ char* given[] = {{{listed}}}; {_identifier(name)}({result}, given); }}"

    # Moves.

    def _mov(self, i: Instruction) -> str:
        to, value = i.operands
        if not to.startswith("{") and not value.startswith("{"):
            return self._set(to, self._value(value, i.type))
        parts = self._elements(value if value.startswith("{") else to)
        bits = 8 * bytes_of(i.type) // len(parts)
        if value.startswith("{"):
            placed = (f"uint64_t{{{self._value(part, f'b{bits}')}}} << {bits * n}" for n, part in enumerate(parts))
            return self._set(to, f"static_cast<{TYPES[i.type]}>({' | '.join(placed)})")
        whole, kind = self._value(value, i.type), TYPES[f"b{bits}"]
        return " ".join(self._set(part, f"static_cast<{kind}>({whole} >> {bits * n})") for n, part in enumerate(parts))

    def _cvta(self, i: Instruction) -> str | None:
        if "shared" in i.opcode and "to" not in i.opcode:
            return None
        return self._set(i.operands[0], self._value(i.operands[1], i.type))

    def _cvt(self, i: Instruction) -> str | None:
        if special := _CONVERSIONS.get(".".join(i.opcode)):
            kind, conversion = special
            return self._set(i.operands[0], f"{conversion}({self._value(i.operands[1], kind)})")
        if _OTHER_ROUNDING & {*i.opcode} or not {*i.opcode[-2:]} <= {*TYPES}:
            return None
        to, source = i.opcode[-2:]
        value = self._value(i.operands[1], source)
        if source[0] == "f" and to[0] != "f":
            return self._set(i.operands[0], f"truncated<{TYPES[to]}>({value})") if "rzi" in i.opcode else None
        return self._set(i.operands[0], f"static_cast<{TYPES[to]}>({value})")

    # Comparisons.

    def _setp(self, i: Instruction) -> str | None:
        if len(i.opcode) != 3:
            return None
        how, kind = i.opcode[1:]
        a, b = (self._value(operand, kind) for operand in i.operands[1:])
        if kind[0] == "f" and how == "ne":
            result = f"differ({a}, {b})"
        elif how in _COMPARED:
            result = f"{a} {_COMPARED[how]} {b}"
        elif how in ("num", "nan"):
            result = f"{'!' if how == 'num' else ''}unordered({a}, {b})"
        elif how[:-1] in _COMPARED and how[-1] == "u":
            result = f"unordered({a}, {b}) || {a} {_COMPARED[how[:-1]]} {b}"
        else:
            return None
        return self._set(i.operands[0], f"bool({result})")

    def _selp(self, i: Instruction) -> str:
        a, b = (self._value(operand, i.type) for operand in i.operands[1:3])
        return self._set(i.operands[0], f"{_register(i.operands[3])} ? {a} : {b}")

    # Arithmetic.

    def _mul(self, i: Instruction) -> str:
        if "wide" in i.opcode:
            wide = i.type[0] + str(16 * bytes_of(i.type))
            a, b = (f"{TYPES[wide]}{{{self._value(operand, i.type)}}}" for operand in i.operands[1:])
            return self._set(i.operands[0], f"{a} * {b}")
        if "hi" in i.opcode:
            return self._operation(i, lambda a, b: f"high_product({a}, {b})")
        return self._operation(i, lambda a, b: f"{a} * {b}", _unsigned(i.type))

    def _mad(self, i: Instruction) -> str | None:
        return self._operation(i, lambda a, b, c: f"{a} * {b} + {c}", _unsigned(i.type)) if "lo" in i.opcode else None

    def _div(self, i: Instruction) -> str:
        return self._operation(i, lambda a, b: f"{a} / {b}" if i.type[0] == "f" else f"quotient({a}, {b})")

    def _sqrt(self, i: Instruction) -> str | None:
        return self._operation(i, lambda a: f"std::sqrt({a})") if i.opcode[1:-1] == ("rn",) else None

    def _abs(self, i: Instruction) -> str | None:
        return self._operation(i, lambda a: f"std::fabs({a})") if i.type[0] == "f" else None

    # Bits.

    def _not(self, i: Instruction) -> str:
        return self._operation(i, lambda a: f"{'!' if i.type == 'pred' else '~'}{a}")

    def _shift(self, i: Instruction) -> str:
        name = "shifted_left" if i.opcode[0] == "shl" else "shifted_right"
        value, by = self._value(i.operands[1], i.type), self._value(i.operands[2], "u32")
        return self._set(i.operands[0], f"{name}({value}, {by})")

    _shl = _shr = _shift

    def _bfi(self, i: Instruction) -> str:
        field, into = (self._value(operand, i.type) for operand in i.operands[1:3])
        position, length = (self._value(operand, "u32") for operand in i.operands[3:])
        return self._set(i.operands[0], f"with_field({field}, {into}, {position}, {length})")

    def _prmt(self, i: Instruction) -> str | None:
        a, b, selector = (self._value(operand, "b32") for operand in i.operands[1:])
        return self._set(i.operands[0], f"permuted({a}, {b}, {selector})") if len(i.opcode) == 2 else None
