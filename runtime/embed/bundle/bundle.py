"""Makes a bundle, step by step: modules, libraries, our own two, licences, a list of it all, a first start."""

from __future__ import annotations

import json
import os
import platform
import py_compile
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from outrider.plans.errors import EmbedError
from outrider.plugins.onnxruntime_ops import cpu_library
from outrider.runtime.embed.build import BRIDGE, LIBRARY, Compilers, Home, build_for, python_library
from outrider.runtime.embed.bundle.component import Component, of_distribution, of_library, of_python, write_licences
from outrider.runtime.embed.bundle.contents import FILES, INTERPRETER, LEFT_OUT, OURS, ROOTS, RUST
from outrider.runtime.embed.bundle.modules import PYTHON, Module, find_modules
from outrider.runtime.embed.bundle.shared_objects import Tools

LIST = "bundle.json"
PRIVATE = Path("lib/outrider")
"""Folder of the interpreter and of the libraries that only the bundle uses."""
MODULES = PRIVATE / "python"
"""The one folder that modules are imported from."""
_CHECK = Path(__file__).resolve().parent / "check.c"
_RPATH = ("-Wl,-rpath,$ORIGIN/outrider", "-Wl,--disable-new-dtags")  # which comes before LD_LIBRARY_PATH


@dataclass(frozen=True)
class Bundle:
    """A bundle that was made: `bytes` with everything, the oldest `glibc` and the `machine` that run it."""

    folder: Path
    bytes: int
    components: list[Component]
    glibc: str
    machine: str

    @property
    def warnings(self) -> list[str]:
        """What its maker should see to before it is passed on."""
        return [
            f"no licence text of {each.name} {each.version} was found here; add it to licences/ before you pass it on"
            for each in self.components
            if not each.has_licence_text
        ] + [
            f"{each.name} {each.version} has other packages compiled into it and no list of them was found here; "
            "add their names and licences to licences/ before you pass it on"
            for each in self.components
            if each.name in RUST and each.inside is None
        ]

    def to_json(self) -> dict[str, object]:
        """The stable keys of `--bundle --json`."""
        components = [
            {"name": each.name, "version": each.version, "licence": each.licence, "bytes": each.bytes}
            for each in self.components
        ]
        facts = {"folder": str(self.folder), "bytes": self.bytes, "glibc": self.glibc, "machine": self.machine}
        return {**facts, "components": components, "warnings": self.warnings}


def bundle(out: Path, report: Callable[[str], None] = lambda text: None) -> Bundle:
    """Make a bundle at `out`, which is whole or not there; a bundle that lies there is replaced.

    Raises `EmbedError` for a folder that is none of ours or cannot be written, where a tool, a compiler, cffi or
    Python's shared library is missing, and where the bundle does not start.
    """
    if out.exists() and not (out / LIST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise EmbedError(f"{out} exists and is no bundle, so it is not replaced; pass another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            folder.chmod(0o755)
            maker = _Maker(folder.resolve(), report)
            maker.make()
            if out.exists():
                shutil.rmtree(out)
            folder.rename(out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise EmbedError(f"the bundle cannot be written to {out}: {error}; pass another folder") from None
    return maker.made(out)


class _Maker:
    """A bundle while it is made in `folder`."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._tools, self._compilers = Tools(), Compilers(())
        self._components: dict[str, Component] = {}
        self._originals: dict[Path, Path] = {}  # of shared objects, by their place in the bundle
        self._python = python_library()
        self._glibc = ""

    def make(self) -> None:
        self._report("reading imports")
        modules = find_modules((*ROOTS, *INTERPRETER))
        self._report("modules")
        for module in modules:
            self._add_module(module)
        for name, patterns in FILES.items():
            self._add_files(name, patterns)
        self._add_shared(cpu_library(), MODULES / "outrider" / "plugins", OURS)
        self._add_shared(self._python, PRIVATE, PYTHON)
        self._report("libraries")
        self._add_needed()
        self._report("the C library")
        self._add_library()
        self._add_needed()
        self._slim()
        major, minor = self._tools.glibc(self._folder / place for place in self._originals)
        self._glibc = f"{major}.{minor}"
        self._report("licences")
        write_licences(self._components.values(), self._folder / "licences")
        self._write_list()
        self._report("starting it")
        self._check([module.name for module in modules if module.is_compiled])

    def made(self, folder: Path) -> Bundle:
        """What was made, which lies at `folder` now."""
        total = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
        return Bundle(folder, total, self._sorted(), self._glibc, platform.machine())

    def _sorted(self) -> list[Component]:
        return sorted(self._components.values(), key=lambda each: each.name.lower())

    def _component(self, name: str) -> Component:
        if name not in self._components:
            self._components[name] = of_python() if name == PYTHON else of_distribution(name)
        return self._components[name]

    def _add_module(self, module: Module) -> None:
        if module.is_compiled:
            self._add_shared(module.path, MODULES / module.place.parent, module.component)
            return
        place = MODULES / module.place.with_suffix(".pyc")
        (self._folder / place).parent.mkdir(parents=True, exist_ok=True)
        py_compile.compile(
            str(module.path), str(self._folder / place), dfile=f"outrider/{module.place}", doraise=True, optimize=0,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )  # fmt: skip
        self._component(module.component).files.append(place.as_posix())

    def _add_files(self, name: str, patterns: Iterable[str]) -> None:
        found = distribution(name)
        for file in found.files or ():
            path = Path(str(found.locate_file(file)))
            if not any(file.match(pattern) for pattern in patterns):
                continue
            if path.suffix == ".so":
                self._add_shared(path, MODULES / file.parent, name)
                continue
            place = MODULES / file
            (self._folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self._folder / place)
            self._component(name).files.append(place.as_posix())

    def _add_shared(self, path: Path, folder: Path, component: str) -> None:
        place = folder / path.name
        (self._folder / folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, self._folder / place)
        (self._folder / place).chmod(0o755)
        self._originals[place] = path
        self._component(component).files.append(place.as_posix())

    def _add_library(self) -> None:
        """Link the bridge with all private libraries: modules then find them by name, wherever they look themselves."""
        private = [str(self._folder / place) for place in self._originals if place.parent == PRIVATE]
        home = Home(("-DOUTRIDER_BUNDLE",), ("-Wl,--no-as-needed", *private, *_RPATH), _RPATH)
        for path in build_for(home, self._folder, lambda part: None, self._compilers):
            place = path.relative_to(self._folder)
            self._component(OURS).files.append(place.as_posix())
            if path.name in (LIBRARY, BRIDGE):
                self._originals[place] = path

    def _add_needed(self) -> None:
        """Copy libraries that the shared objects need: those of a package to where they lie in it, others to ours."""
        for place, original in list(self._originals.items()):
            for name, path in self._tools.libraries(original).items():
                if any(known.name == name for known in self._originals):
                    continue
                library, in_package = path.parent / name, self._within_package(place, original, name)
                if in_package is not None:
                    self._add_shared(library, in_package, self._owner(place))
                else:
                    self._add_shared(library, PRIVATE, self._system_library(path))

    def _within_package(self, place: Path, original: Path, name: str) -> Path | None:
        """The folder of the bundle for a library that a package has brought for `original`; None for another one."""
        for folder in self._tools.run_paths(original):
            relative = folder.removeprefix("$ORIGIN/")
            if relative != folder and (original.parent / relative / name).is_file():
                return Path(os.path.normpath(place.parent / relative))
        return None

    def _owner(self, place: Path) -> str:
        return next(name for name, each in self._components.items() if place.as_posix() in each.files)

    def _system_library(self, path: Path) -> str:
        """The name of a component that is made for a library of the system."""
        found = of_library(path)
        return self._components.setdefault(found.name, found).name

    def _slim(self) -> None:
        for place in self._originals:
            self._tools.strip(self._folder / place)
            self._tools.make_relative(self._folder / place)

    def _write_list(self) -> None:
        for each in self._components.values():
            each.bytes = sum((self._folder / file).lstat().st_size for file in each.files)
        listed = {
            "outrider": version(OURS),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "glibc": self._glibc,
            "components": [each.to_json() for each in self._sorted()],
            "left_out": LEFT_OUT,
        }
        (self._folder / LIST).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")

    def _check(self, modules: list[str]) -> None:
        """Start the bundle without this environment, and load every shared object."""
        lib = self._folder / "lib"
        with TemporaryDirectory(prefix="outrider-check-") as folder:
            program = Path(folder) / "check"
            self._compilers.run(
                "C", "-std=gnu11", f"-I{self._folder / 'include'}", _CHECK, "-o", program, f"-L{lib}", "-loutrider",
                f"-Wl,-rpath,{lib}", "-ldl",
            )  # fmt: skip
            done = subprocess.run(
                [program, *modules], cwd=folder, env={}, capture_output=True, text=True, check=False, timeout=300
            )
        if done.returncode:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise EmbedError(f"the bundle does not start: {said[-3000:]}")
