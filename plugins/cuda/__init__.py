"""The ops on CUDA devices: their kernel launches, and the compilation of kernels ahead of time."""


def __getattr__(name: str) -> object:
    if name == "LAUNCHES":
        from outrider.plugins.ops import OPS

        return {name: op.launch for name, op in OPS.items() if op.launch}
    raise AttributeError(name)
