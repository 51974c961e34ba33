"""The machine: its processor and what that can do, and the memory that a process took."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

_ARITHMETIC = re.compile(r"(s?sse|avx|fma|f16c|amx|asimd|fphp|i8mm|bf16|sve)|sme(?!p)")
"""How the names of extensions begin that compute, on x86 and on Arm."""


def processor() -> str:
    """The model of the CPU; on Arm, where Linux knows no names, the numbers of who made it and what it is."""
    maker, part = _cpu_info("CPU implementer"), _cpu_info("CPU part")
    numbers = f"{platform.machine()} of {maker}, part {part}" if maker and part else ""
    return _cpu_info("model name") or numbers or platform.processor() or platform.machine()


def available_cores() -> int:
    """Number of cores that this process may use, as the system counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def instruction_set() -> str:
    """The processor's extensions by which libraries choose kernels, such as "avx avx2 fma"; "" where Linux is not."""
    flags = _cpu_info("flags") or _cpu_info("Features")
    return " ".join(sorted(flag for flag in flags.split() if _ARITHMETIC.match(flag)))


def _cpu_info(key: str) -> str:
    """What Linux says of the first core; "" where it says nothing of that."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def peak_rss_bytes() -> int | None:
    """The most memory that this process has held since it began; None where the system does not report it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
