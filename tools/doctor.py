"""`outrider doctor [PLAN]` reports installed extras, processor features, and the backends that can run."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from outrider.commands.arguments import Parser
from outrider.commands.console import guarded, print_json, stdout
from outrider.plans.machine import available_cores, instruction_set, processor
from outrider.plans.plan import open_plan


def main(arguments: Sequence[str] | None = None, called: str = "python -m outrider.tools.doctor") -> int:
    return guarded(lambda: _main(arguments, called))


def _main(arguments: Sequence[str] | None, called: str) -> int:
    parser = Parser(
        prog=called,
        description="Say what of Outrider is installed, what this machine's processor has, and which backends can run: "
        "with a plan, which of its own.",
        epilog=f"examples: {called}; {called} build/reference",
    )
    parser.add_argument("plan", type=Path, nargs="?", help="folder of a plan")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = examine(options.plan)
    if options.json:
        print_json(found)
        return 0
    width = max(map(len, found))
    for name, sentence in found.items():
        stdout.print(f"{name:{width}}  {sentence}", soft_wrap=True)
    return 0


def examine(plan: Path | None) -> dict[str, str]:
    """A sentence for each thing that is looked at, by its name. Raises PlanError for what is no plan."""
    found = {
        "outrider": f"{version('outrider')}, on Python {platform.python_version()} ({sys.platform})",
        "processor": f"{processor()}, {available_cores()} cores for this process, {instruction_set()}",
        "nvidia driver": _driver(),
    }
    for extra, packages in sorted(_extras().items()):
        missing = [package for package in packages if not _is_installed(package)]
        found[f"extra {extra}"] = f"lacks {', '.join(missing)}" if missing else "installed"
    if plan is not None:
        from outrider.runtime.backends import reason_against

        for name, backend in open_plan(plan, verify=False).manifest.backends.items():
            reason = reason_against(name, backend)
            found[f"backend {name}"] = "runs here" if reason is None else f"does not run here: {reason}"
    return found


def _extras() -> dict[str, list[str]]:
    """Packages that this system needs, by extra."""
    found: dict[str, list[str]] = {}
    requirements = [Requirement(text) for text in requires("outrider") or ()]
    for extra in metadata("outrider").get_all("Provides-Extra") or ():
        needed = [
            each.name
            for each in requirements
            if each.marker is not None
            and not each.marker.evaluate({"extra": ""})
            and each.marker.evaluate({"extra": extra})
            and each.name != "outrider"
        ]
        if needed:
            found[extra] = needed
    return found


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _driver() -> str:
    number = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(number)):
            return "is installed, and finds no GPU that it can use"
    except (AttributeError, OSError):
        return "is not installed: no backend for GPUs can run"
    return f"for CUDA {number.value // 1000}.{number.value % 1000 // 10}"


if __name__ == "__main__":
    sys.exit(main())
