"""The first lines that the embedded interpreter runs; cffi puts them into the bridge."""

# ruff: noqa
from _outrider_bridge import ffi, lib

try:
    from runtime.embed.calls import attach

    attach(ffi, lib)
    _failure = b""
except BaseException as error:  # whatever it is, C gets a sentence
    _failure = f"{type(error).__name__}: {error}".encode()


@ffi.def_extern()
def outrider_py_ready(why, size):
    text = _failure[: size - 1] + b"\0"
    ffi.buffer(why, len(text))[:] = text
    return 0 if _failure else 1
