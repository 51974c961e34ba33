"""What a bundle is made of: where its modules begin, and what reading their imports does not show."""

from __future__ import annotations

import sys

ROOTS = ("outrider.runtime.embed.calls", "_cffi_backend")
"""What the bridge imports."""

INTERPRETER = ("codecs", "encodings.*", "io", "linecache", "os", "threading", "traceback", "warnings", "zipimport")
"""What the interpreter itself imports: as it starts, to print an error, and as it ends."""

DISTRIBUTIONS = (
    "annotated-types", "cffi", "jinja2", "llguidance", "markupsafe", "numpy", "onnxruntime", "pydantic",
    "pydantic-core", "tokenizers", "typing-extensions", "typing-inspection",
)  # fmt: skip
"""Packages whose modules are taken where they are imported. An import of any other one is optional, and stays out."""

RUST = ("llguidance", "pydantic-core", "tokenizers")
"""Packages into whose shared objects many others were compiled, which have licences of their own."""

OURS = "outrider"
"""Our own distribution, and the name of its package."""

HIDDEN: dict[str, tuple[str, ...]] = {
    OURS: ("outrider.runtime.runtime", "outrider.runtime.prefix_cache.*", "outrider.runtime.request_queue"),
    "outrider.runtime.backends": ("outrider.runtime.backends.*",),
    "outrider.runtime.drafters": ("outrider.runtime.drafters.*",),
    "numpy": ("numpy._core.*",),
    "numpy.random": ("numpy.random.*", "secrets", "hmac"),
    "pydantic": ("pydantic.*",),
    "jinja2": ("jinja2.*",),
    "llguidance": ("llguidance.*",),
    "tokenizers": ("tokenizers.*",),
    "_datetime": ("_strptime",),
    "_pickle": ("copyreg", "_compat_pickle"),
    "sysconfig": (f"_sysconfigdata_{sys.abiflags}_{sys.platform}_{getattr(sys.implementation, '_multiarch', '')}",),
    "hashlib": ("_hashlib", "_blake2", "_sha1", "_sha256", "_sha3", "_sha512", "_md5"),
    "ctypes": ("_ctypes",),
}
"""Modules that come with another, because compiled code imports them, or a name that is known when it runs."""

FILES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime/capi/libonnxruntime_providers_shared.so",),  # without it, it warns as it starts
    "llguidance": ("llguidance-*.dist-info/METADATA",),  # asked for its version as it is imported
}
"""Files that are no modules, by distribution, as patterns of their paths."""

LEFT_OUT: dict[str, str] = {
    "numpy.f2py": "compiles Fortran",
    "numpy.testing": "is for tests",
    "numpy.random.tests": "is for tests",
    "numpy._core.cversions": "is for building NumPy",
    "numpy._core._multiarray_tests": "is for tests",
    "numpy._core._operand_flag_tests": "is for tests",
    "numpy._core._rational_tests": "is for tests",
    "numpy._core._struct_ufunc_tests": "is for tests",
    "numpy._core._umath_tests": "is for tests",
    "numpy._core._simd": "is for tests of vector instructions",
    "numpy.distutils": "is for building packages",
    "numpy.fft": "is loaded where it is named, which nothing here does",
    "numpy.polynomial": "is loaded where it is named, which nothing here does",
    "onnxruntime.transformers": "changes models",
    "onnxruntime.capi.onnxruntime_collect_build_info": "is for a fault of CUDA's installation",
    "pydantic.mypy": "is for type checkers",
    "pydantic.v1": "is pydantic's first version",
    "llguidance.cli": "is a command",
    "llguidance.hf": "is for transformers",
    "llguidance.llamacpp": "is for llama.cpp",
    "llguidance.tiktoken": "is for tiktoken",
    "llguidance.torch": "is for PyTorch",
    "llguidance.mlx": "is for MLX",
    "tokenizers.tools": "draws tokens in notebooks",
    "_bz2": "needs libbz2, of which nothing here reads a file",
    "_lzma": "needs liblzma, of which nothing here reads a file",
    "_ssl": "needs OpenSSL's libssl: nothing here opens a connection",
    "_uuid": "needs libuuid: `uuid` does without",
    "doctest": "is for tests",
    "pydoc": "shows documentation",
    "ftplib": "is a network protocol",
    "http": "is a network protocol",
    "multiprocessing": "is for programs that are Python's own: the executable is the application's",
}
"""Modules, each with all in it, that stay out although something names them, and what each is for."""

CUT_ENCODINGS = (
    "_codecs_cn", "_codecs_hk", "_codecs_iso2022", "_codecs_jp", "_codecs_kr", "_codecs_tw", "_multibytecodec",
)  # fmt: skip
"""Compiled codecs, of which texts that are UTF-8 need none."""

SYSTEM = frozenset({
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2",
    "libpthread.so.0", "librt.so.1", "libresolv.so.2", "libutil.so.1", "libanl.so.1",
})  # fmt: skip
"""Libraries of glibc, which every machine has that a bundle may be copied to."""
