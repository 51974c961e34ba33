"""Which modules a bundle needs: imports are read, not run, wherever they stand, from the roots on."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from outrider.plans.errors import EmbedError
from outrider.plans.extras import install
from outrider.runtime.embed.bundle.contents import CUT_ENCODINGS, DISTRIBUTIONS, HIDDEN, LEFT_OUT, OURS

PYTHON = "Python"
"""The component of modules that come with the interpreter."""


@dataclass(frozen=True)
class Module:
    """A file that is imported as `name`; `component` is the distribution that it is part of."""

    name: str
    path: Path
    component: str
    is_package: bool

    @property
    def is_compiled(self) -> bool:
        """Whether it is a shared object."""
        return self.path.name.endswith(tuple(EXTENSION_SUFFIXES))

    @property
    def place(self) -> Path:
        """Where it lies in a folder that modules are imported from, as source or shared object."""
        parts = self.name.split(".")
        if self.is_package:
            return Path(*parts, self.path.name)
        return Path(*parts[:-1], self.path.name)


def find_modules(roots: Iterable[str]) -> list[Module]:
    """Every module that `roots` import, by statements anywhere in a file, and by `HIDDEN`; without `LEFT_OUT`.

    A name that ends in `.*` stands for a package and all in it. Raises `EmbedError` where a root or a package that
    is needed is missing.
    """
    owners = _owners()
    found: dict[str, Module] = {}
    missing: set[str] = set()
    waiting = [name for root in roots for name in _expand(root)]
    needed = {root.removesuffix(".*") for root in roots}
    while waiting:
        name = waiting.pop()
        if name in found or name in missing or _is_left_out(name):
            continue
        owner = owners.get(name.partition(".")[0])
        spec = _find(name) if owner else None
        if owner is None or spec is None or not spec.origin or not Path(spec.origin).is_file():
            if name in needed and not _is_built_in(name):
                raise EmbedError(f"the module {name} is not found in {sys.prefix}; {install('embed')}")
            missing.add(name)
            continue
        module = Module(name, Path(spec.origin), owner, spec.submodule_search_locations is not None)
        found[name] = module
        if parent := name.rpartition(".")[0]:
            waiting.append(parent)
        if not module.is_compiled:
            waiting += _imports(module)
        waiting += [each for hidden in HIDDEN.get(name, ()) for each in _expand(hidden)]
    return sorted(found.values(), key=lambda module: module.name)


def _owners() -> dict[str, str]:
    """The component that each module at the top belongs to, of those that a bundle may have."""
    owners = dict.fromkeys(sys.stdlib_module_names, PYTHON)
    for name in DISTRIBUTIONS:
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:
            raise EmbedError(f"the package {name} is not installed in {sys.prefix}; {install('embed')}") from None
        for file in files:
            top = file.parts[0].partition(".")[0]
            if file.suffix in (".py", ".so") and "-" not in top and top != "":
                owners.setdefault(top, name)
    owners |= dict.fromkeys(HIDDEN["sysconfig"], PYTHON)
    return owners | {OURS: OURS}


def _is_left_out(name: str) -> bool:
    parts = name.split(".")
    return name in CUT_ENCODINGS or any(".".join(parts[:length]) in LEFT_OUT for length in range(1, len(parts) + 1))


def _is_built_in(name: str) -> bool:
    return name in sys.builtin_module_names


def _find(name: str) -> ModuleSpec | None:
    """Find a module without running the packages that it is in."""
    above, _, _ = name.rpartition(".")
    path: list[str] | None = None
    if above:
        parent = _find(above)
        if parent is None or parent.submodule_search_locations is None:
            return None
        path = list(parent.submodule_search_locations)
    try:
        if (spec := PathFinder.find_spec(name, path)) is not None and spec.origin is not None:
            return spec
        # An editable install finds compiled modules apart from its sources.
        return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, path)) is not None), None)
    except KeyError:  # a folder without `__init__.py` in a package that is not loaded: no module of any package here
        return None


def _expand(name: str) -> Iterator[str]:
    """The name, and where it ends in `.*` those of all modules in that package."""
    name, _, rest = name.partition(".*")
    yield name
    spec = _find(name) if rest == "" and not _is_built_in(name) else None
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            yield from _within(Path(folder), name)


def _within(folder: Path, package: str) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        stem = entry.name.partition(".")[0]
        if not stem.isidentifier() or stem.startswith("__") or _is_left_out(f"{package}.{stem}"):
            continue
        if (entry / "__init__.py").is_file():
            yield f"{package}.{stem}"
            yield from _within(entry, f"{package}.{stem}")
        elif entry.suffix == ".py" or entry.name.endswith(tuple(EXTENSION_SUFFIXES)):
            yield f"{package}.{stem}"


def _imports(module: Module) -> Iterator[str]:
    """Names that a file may import: of `from a import b`, `a` and `a.b`, which may be a module.

    What only type checkers read is left out.
    """
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(module.path.read_bytes())]  # what has statements: expressions import nothing
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and _is_for_type_checkers(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}"
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(node, part, ())


def _is_for_type_checkers(test: ast.expr) -> bool:
    return (test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")) == "TYPE_CHECKING"
