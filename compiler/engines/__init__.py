"""Write the engine files that a backend loads: one class per builder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import onnx_ir as ir

from outrider.plans.manifest import Engine


class EngineFolder(Protocol):
    """A writer of one backend's engines into a folder of the plan."""

    def takes_ops(self, model: ir.Model) -> bool:
        """Return whether the engine of an exported graph may hold the ops around it."""

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        """Write the engine `name` of a lowered graph whose symbols go up to `limits`.

        Raises `PlanError`, with the library's own words, where the engine cannot be built.
        """

    def close(self) -> None:
        """Finish the folder; called once, after the last engine or the first that failed."""
