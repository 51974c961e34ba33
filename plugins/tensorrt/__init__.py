"""Our ops inside TensorRT engines: kernels that TensorRT keeps in the engine and launches itself, without Python.

Call `register_plugins()` before an ONNX graph is parsed: nodes of domain `outrider` then become plugins, found by
namespace and name: `plugins.ops` has those of each op, `table.py` the limits of TensorRT's kernels. README.md says what
a graph needs.

Not executed here, because TensorRT's libraries cannot be installed: no plugin was ever registered with the library,
parsed from ONNX, timed by the builder, or run in an engine, and the PTX has not run on a GPU. The rest is plain Python
and CUDA, tested without TensorRT: the order of parameters, shapes, types, launch formulas (against
`plugins.cuda.DeviceOp`), the PTX, and the plugins' kernels, run as blocks of fibers on the CPU and compared with the
CPU kernels, or with the references where an op has no CPU kernel.
"""
