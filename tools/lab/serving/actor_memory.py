"""What actors of one machine share: the proportional set size (PSS) of the first, and what a second one adds.

PSS counts a page that several processes map in equal parts to each, so that sums are memory that the machine has given.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from outrider.commands.console import progress_bar
from outrider.commands.packages import optional_packages
from outrider.plans.errors import OutriderError
from outrider.plans.plan import open_plan
from outrider.tools.measuring import Column, make_table

_SUMMED = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Begin actors one after another; each answers requests; a row for each actor at each number of them."""
    with optional_packages("Measuring actors", "ray"):
        import ray

        from outrider.runtime.ray_cluster import cluster
    if not Path("/proc/self/smaps_rollup").exists():
        raise OutriderError(
            "This system has no /proc/PID/smaps_rollup, which lists the memory of a process; measure on Linux."
        )
    from outrider.runtime.batch import OutriderPredictor

    actor = ray.remote(num_cpus=1)(_Answering)
    rows, actors = [], list[Any]()
    with cluster(None, options.actors), progress_bar("measuring") as progress:
        for count in range(1, options.actors + 1):
            progress(count - 1, options.actors, f"{count} actors")
            load = {"threads": 1, "share_memory": not options.unshared, "max_running": options.max_running}
            actors.append(actor.remote(OutriderPredictor, str(options.plan.absolute()), load))
            ray.get(actors[-1].answer.remote(options.length, options.new))
            for place, each in enumerate(actors):
                rows.append({"actors": count, "actor": place + 1, **_memory(ray.get(each.pid.remote()))})
    sums = {count: sum(row["Pss"] for row in rows if row["actors"] == count) for count in (1, 2)}
    first = sums[1]
    return {
        "identity": open_plan(options.plan, verify=False).manifest.identity,
        "plan_bytes": sum(file.size for file in open_plan(options.plan, verify=False).manifest.files),
        "shared": not options.unshared,
        "rows": rows,
        "added": (sums[2] - first) / first,
    }


class _Answering:
    """An actor that answers requests."""

    def __init__(self, predictor: Any, plan: str, load: dict[str, Any]) -> None:
        self._predictor = predictor(plan, **load)

    def pid(self) -> int:
        import os

        return os.getpid()

    def answer(self, length: int, new: int) -> list[str]:
        prompts = np.array([f"{number} " + "def f(x):\n" * (length // 4) for number in range(8)], object)
        asked = {"prompt": np.array([prompt[:length] for prompt in prompts], object), "max_tokens": np.full(8, new)}
        return list(self._predictor(asked)["error"])


def _memory(pid: int) -> dict[str, int]:
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, kibibytes = line.partition(":")
        if name in _SUMMED:
            found[name] = 1024 * int(kibibytes.split()[0])
    return found


def print_memory(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"plan {report['identity'][:12]} of {report['plan_bytes'] / 1e6:.0f} MB; memory is "
        f"{'shared' if report['shared'] else 'not shared'}"
    )
    heads = ("PSS MB", "anonymous", "of files", "of shared memory")
    memory = [Column(head, name, ".0f", per=1e6) for head, name in zip(heads, _SUMMED, strict=True)]
    console.print(make_table([Column("actors", "actors"), Column("actor", "actor"), *memory], report["rows"]))
    console.print(f"a second actor adds {report['added']:.3f}x of the first one's")
