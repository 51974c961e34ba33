"""The kernels of an engine of the backend `cuda`, as `compiler inspect` shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.plans import names
from outrider.plans.kernel_costs import LaunchCost, launch_costs
from outrider.plans.kernel_engine import KernelEngine

_ONE = dict.fromkeys(names.SYMBOLS, 1) | {names.ROW_EDGES: 2}


def describe_kernels(path: Path, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return the launches of a step with one new token after as many keys as are ever in view, by part."""
    engine = KernelEngine.model_validate_json(path.read_bytes())
    sizes = _ONE | {names.VIEW: limits[names.VIEW], names.CAPACITY: limits[names.VIEW]}
    costs = launch_costs(engine, sizes)
    return {
        "ops": dict(Counter(cost.launch.kernel.removeprefix("outrider_") for cost in costs).most_common()),
        "workspace_bytes": engine.workspace_size,
        "keys_in_view": limits[names.VIEW],
        "parts": _parts(costs),
    }


def _parts(costs: list[LaunchCost]) -> list[dict[str, Any]]:
    """Return what each part launches, in the order in which parts begin."""
    parts: dict[str, dict[str, Any]] = {}
    for cost in costs:
        part = parts.setdefault(
            cost.launch.part or "other", {"kernels": [], "bytes_moved": 0, "operations": 0, "blocks": []}
        )
        part["kernels"].append(cost.launch.kernel.removeprefix("outrider_"))
        part["blocks"].append(cost.blocks)
        part["bytes_moved"] += cost.moved
        part["operations"] += cost.operations
    return [{"part": name, **part} for name, part in parts.items()]
