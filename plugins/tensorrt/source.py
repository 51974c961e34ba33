"""The CUDA source of plugins, generated from the table around the kernels of csrc/cuda.

TensorRT gives a kernel its inputs, then 32-bit integers, then its outputs. Our kernels take 64-bit integers, last. So a
plugin's kernel is a shell in TensorRT's order that checks its guard and calls our kernel, compiled as a function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.plugins.cuda.launches import STATUS
from outrider.plugins.schema import TensorSpec
from outrider.plugins.tensorrt.plugin import SAME_SIZE, Plugin

PARTS = Path(__file__).resolve().parent  # parts.cu.h

_TYPES = {"int64": "i64", "uint64": "u64", "float32": "float", "float64": "double"}
_MOVED = "char"  # the type of data that a kernel only moves

_BEFORE = """\
#include "block.h"
#undef OUTRIDER_KERNEL
#define OUTRIDER_KERNEL OUTRIDER_DEVICE void  // kernels that the plugin's own kernel calls
#include "kernels.cu"
#include "parts.cu.h"
#define OUTRIDER_PLUGIN extern "C" __global__ void

"""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a plugin's kernel, as C++ declares it: an address (8 bytes) or an int32."""

    type: str
    name: str

    @property
    def bits(self) -> int:
        return 64 if self.type.endswith("*") else 32


def cuda_source(plugin: Plugin) -> str:
    """Return a translation unit with the plugin's kernel as its only global kernel."""
    return _BEFORE + shells([plugin])


def shells(plugins: Iterable[Plugin]) -> str:
    """Return the kernels of `plugins`, to stand after the kernels that they call and parts.cu.h.

    `OUTRIDER_PLUGIN` declares a plugin's kernel.
    """
    return (
        "namespace outrider {\n\n" + "".join(f"{_shell(plugin)}\n" for plugin in plugins) + "}  // namespace outrider\n"
    )


def parameters(plugin: Plugin) -> tuple[Parameter, ...]:
    """Return the parameters of a plugin's kernel, in TensorRT's order."""
    return (
        *(Parameter(f"const {_type(spec)}*", spec.name) for spec in plugin.inputs),
        *(Parameter("i32", name) for name in plugin.arguments),
        *(Parameter(f"{_type(spec)}*", _output(plugin, spec.name)) for spec in plugin.outputs),
    )


def _type(spec: TensorSpec) -> str:
    return _TYPES.get(spec.dtype, _MOVED)


def _output(plugin: Plugin, name: str) -> str:
    return f"{name}_out" if name in plugin.aliased else name


def _shell(plugin: Plugin) -> str:
    declared = ", ".join(f"{parameter.type} {parameter.name}" for parameter in parameters(plugin))
    own_status = f"{STATUS}[block_index()]"
    reports = any(spec.name == STATUS for spec in plugin.outputs)
    lines = [f"OUTRIDER_PLUGIN {plugin.kernel}({declared}) {{"]
    if reports:
        lines.append(f"  if (thread_index() == 0) {own_status} = kNoFault;")
    if plugin.guard:
        lines.append(f"  if (!({plugin.guard})) {{")
        if reports:
            lines.append(f"    if (thread_index() == 0) {own_status} = kIndexFault;")
        lines += ["    return;", "  }"]
    lines += [f"  {plugin.launch.kernel}({', '.join(_passed(plugin))});", "}", ""]
    return "\n".join(lines)


def _passed(plugin: Plugin) -> list[str]:
    """Return the arguments with which the shell calls the kernel."""
    pointers = {name: _output(plugin, name) for name in plugin.launch.pointers}
    pointers |= {STATUS: f"{STATUS} + block_index()", **plugin.stand_ins}
    numbers = [SAME_SIZE.get(name, name) for name in plugin.launch.numbers]
    return [pointers[name] for name in plugin.launch.pointers] + numbers
