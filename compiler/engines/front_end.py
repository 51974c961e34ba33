"""The interface of front ends, which put a graph into a TensorRT network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir


class FrontEnd(Protocol):
    @property
    def name(self) -> str:
        """The front end's name, as `plans.manifest.Engine.front_end` records it."""

    def reason_against(self, model: ir.Model) -> str | None:
        """Return why the front end declines this graph; None where it does not."""

    def fill(self, engine: str, model: ir.Model, network: Any, workplace: Path) -> Any:
        """Put the lowered `model` into an empty `network`, with its inputs and outputs by name.

        `workplace` is a folder for files that live as long as the network. The caller must keep the returned object as
        long, too. Raises `PlanError`, with the library's own words.
        """
