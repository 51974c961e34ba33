"""Our ops inside TensorRT engines: kernels that TensorRT keeps in the engine and launches itself, without Python.

`register_plugins()` before an ONNX graph is parsed; nodes of domain `outrider` become plugins then, found by namespace
and name (`table.py` says which, and what TensorRT's kernels imply). README.md says what a graph has to bring.

Never executed here, where TensorRT's libraries cannot be installed: no plugin was ever registered with the library
itself, parsed from ONNX, timed by its builder, kept in an engine or run by one; nor has its PTX run on a GPU. The rest
is plain Python and CUDA that is tested without it: which parameters in which order, shapes, types, formulas of launches
(against `plugins.cuda.DeviceOp`), the PTX, and the plugins' kernels themselves, run as blocks of fibers on the CPU and
compared with the CPU kernels, or with the references where an op has none.
"""

from plugins.tensorrt.compile import compile_plugin
from plugins.tensorrt.plugin import Declined, Plugin
from plugins.tensorrt.registration import register_plugins
from plugins.tensorrt.table import PLUGINS

__all__ = ["PLUGINS", "Declined", "Plugin", "compile_plugin", "register_plugins"]
