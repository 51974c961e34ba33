"""Builds liboutrider and its bridge for this environment, with what C and CMake projects need to find it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.plans.errors import EmbedError
from outrider.plans.extras import install

SOURCES = Path(__file__).resolve().parent
LIBRARY, LINK = "liboutrider.so.0", "liboutrider.so"
BRIDGE = "liboutrider-python.so"  # as in bridge.h
_STRUCTS = re.compile(r"^typedef struct \{.*?^\} \w+;", re.MULTILINE | re.DOTALL)  # of headers, for cffi too
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
_CHOICES = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++")}

# What the interpreter runs first, of the bridge's own module.
_START = """\
from _outrider_bridge import ffi, lib
try:
    from outrider.runtime.embed.calls import attach
    attach(ffi, lib)
    failure = b""
except BaseException as error:  # C gets a sentence
    failure = f"{type(error).__name__}: {error}".encode()

@ffi.def_extern()
def outrider_py_ready(why, size):
    text = failure[:size - 1] + b"\\0"
    ffi.buffer(why, len(text))[:] = text
    return 0 if failure else 1
"""

_PKG_CONFIG = """\
prefix=${{pcfiledir}}/../..
libdir=${{prefix}}/lib
includedir=${{prefix}}/include

Name: outrider
Description: An LLM engine that decodes speculatively and exactly
Version: {version}
Libs: -L${{libdir}} -loutrider
Cflags: -I${{includedir}}
"""

_CMAKE = """\
# find_package(Outrider CONFIG), then target_link_libraries(... Outrider::outrider)
get_filename_component(_outrider_prefix "${{CMAKE_CURRENT_LIST_DIR}}/../../.." ABSOLUTE)
if(NOT TARGET Outrider::outrider)
  add_library(Outrider::outrider SHARED IMPORTED)
  set_target_properties(Outrider::outrider PROPERTIES
    IMPORTED_LOCATION "${{_outrider_prefix}}/lib/{library}"
    IMPORTED_SONAME "{library}"
    INTERFACE_INCLUDE_DIRECTORIES "${{_outrider_prefix}}/include")
endif()
set(Outrider_VERSION {version})
set(Outrider_FOUND TRUE)
unset(_outrider_prefix)
"""

_CMAKE_VERSION = """\
set(PACKAGE_VERSION {version})
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
if(NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
"""


@dataclass(frozen=True)
class Home:
    """Where the libraries find their interpreter, as flags of the compilers."""

    compile: tuple[str, ...]
    link_bridge: tuple[str, ...]
    link_library: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Home:
        """This environment, or the one that OUTRIDER_HOME names."""
        return cls((f'-DOUTRIDER_BUILT_FOR="{sys.prefix}"',), (f"-Wl,-rpath,{python_library().parent}",))


def build(out: Path, report: Callable[[str], None] = lambda text: None, *, flags: Sequence[str] = ()) -> list[Path]:
    """Build the library into `out` (`include/`, `lib/`); the files, which may be moved together.

    Programs that use it run in this environment (`sys.prefix`), or in the one that OUTRIDER_HOME names. `flags` are for
    the compilers, besides their own. Raises `EmbedError` where cffi, a C or C++ compiler, or Python's shared library is
    missing, or where `out` cannot be written.
    """
    compilers = Compilers(flags)
    try:
        return build_for(Home.here(), out, report, compilers)
    except OSError as error:
        raise EmbedError(f"the library cannot be written to {out}: {error}; pass another folder") from None


def build_for(home: Home, out: Path, report: Callable[[str], None], compilers: Compilers) -> list[Path]:
    """Build the library that finds its interpreter at `home`. Raises `EmbedError` as `build`, and `OSError`."""
    include, lib = out / "include", out / "lib"
    for folder in (include, lib / "pkgconfig", lib / "cmake" / "Outrider"):
        folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="outrider-embed-") as temporary:
        work = Path(temporary)
        report("bridge")
        _build_bridge(home, compilers, work)
        report("library")
        _build_library(home, compilers, work)
        for name in (BRIDGE, LIBRARY):
            (work / name).chmod(0o755)
            shutil.move(work / name, lib / name)
    (lib / LINK).unlink(missing_ok=True)
    (lib / LINK).symlink_to(LIBRARY)
    shutil.copyfile(SOURCES / "outrider.h", include / "outrider.h")
    facts = {"version": version("outrider"), "library": LIBRARY}
    cmake = lib / "cmake" / "Outrider"
    texts = {
        lib / "pkgconfig" / "outrider.pc": _PKG_CONFIG,
        cmake / "OutriderConfig.cmake": _CMAKE,
        cmake / "OutriderConfigVersion.cmake": _CMAKE_VERSION,
    }
    for path, text in texts.items():
        path.write_text(text.format(**facts), encoding="utf-8")
    return [include / "outrider.h", lib / LIBRARY, lib / LINK, lib / BRIDGE, *texts]


def python_library() -> Path:
    """Python's shared library. Raises `EmbedError` where this Python was built without one."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise EmbedError(
            f"{sys.executable} was built without a shared library, which a C program needs; use a Python that was "
            "configured with --enable-shared, such as the system's"
        )
    return Path(sysconfig.get_config_var("LIBDIR")) / str(sysconfig.get_config_var("INSTSONAME"))


class Compilers:
    """A C and a C++ compiler, which run with `flags`."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = ("-O2", "-g", "-fPIC", "-fvisibility=hidden", f"-I{SOURCES}", *flags)
        self._found = {language: self._find(language, choices) for language, choices in _CHOICES.items()}

    @staticmethod
    def _find(language: str, choices: tuple[str, ...]) -> str:
        found = next(filter(None, map(shutil.which, choices)), None)
        if found is None:
            raise EmbedError(f"there is no {language} compiler on PATH, none of {', '.join(choices)}; install one")
        return found

    def run(self, language: str, *arguments: object) -> None:
        words = [self._found[language], *self._flags, *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmbedError(f"the compiler fails: {' '.join(words)}\n{(done.stderr or done.stdout).strip()[-3000:]}")


def _build_bridge(home: Home, compilers: Compilers, work: Path) -> None:
    """The library that cffi makes of calls.h, with bridge.c, linked to Python's shared library."""
    try:
        from cffi import FFI
    except ImportError as error:
        raise EmbedError(f"the library is built with cffi ({error}); {install('embed')}") from None
    libraries = python_library().parent
    declared = (SOURCES / "calls.h").read_text(encoding="utf-8")
    headers = ((SOURCES / name).read_text(encoding="utf-8") for name in ("outrider.h", "bridge.h"))
    structs = _STRUCTS.findall("\n".join(headers))
    ffi = FFI()
    ffi.cdef("\n".join(structs))
    ffi.embedding_api(f"{declared}\nint32_t outrider_py_ready(char *why, size_t size);")
    ffi.cdef("void outrider_report(const char *text, size_t length);")
    included = '#include "outrider.h"\n#include "bridge.h"\nvoid outrider_report(const char *text, size_t length);'
    ffi.set_source("_outrider_bridge", included)
    ffi.embedding_init_code(_START)
    with redirect_stdout(None):  # where it says what it writes
        ffi.emit_c_code(str(work / "calls.c"))
    python = f"python{sysconfig.get_config_var('LDVERSION')}"
    compilers.run(
        "C", "-std=gnu11", "-shared", *home.compile, f"-I{sysconfig.get_paths()['include']}", work / "calls.c",
        SOURCES / "bridge.c", "-o", work / BRIDGE, f"-L{libraries}", f"-l{python}", *home.link_bridge,
        f"-Wl,-soname,{BRIDGE}",
    )  # fmt: skip


def _build_library(home: Home, compilers: Compilers, work: Path) -> None:
    """The public calls; its symbols are those of outrider.h alone."""
    compilers.run(
        "C", "-std=gnu11", *_WARNINGS, *home.compile, "-c", SOURCES / "library.c", "-o", work / "library.o",
    )  # fmt: skip
    compilers.run("C++", "-std=c++17", *_WARNINGS, "-c", SOURCES / "callback.cc", "-o", work / "callback.o")
    compilers.run(
        "C++", "-shared", work / "library.o", work / "callback.o", "-o", work / LIBRARY, "-ldl", "-pthread",
        *home.link_library, f"-Wl,-soname,{LIBRARY}", "-Wl,-z,nodelete",
    )  # fmt: skip
