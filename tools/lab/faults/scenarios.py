"""The scenarios by name, in the order in which they run. Each module has `run(setting, figures)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from time import monotonic

from outrider.plans.errors import OutriderError
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.setting import Setting


@dataclass(frozen=True)
class Scenario:
    """`what` is done to the server."""

    module: str
    what: str

    def run(self, name: str, setting: Setting) -> Figures:
        """Its figures; an error that ends it is one of the things that are wrong."""
        module = import_module(f"outrider.tools.lab.faults.{self.module}")
        run: Callable[[Setting, Figures], None] = module.run
        figures, began = Figures(name), monotonic()
        try:
            run(setting, figures)
        except (OutriderError, OSError) as error:
            figures.fail(f"The scenario ended with {type(error).__name__}: {error}")
        figures.seconds = round(monotonic() - began, 1)
        return figures


SCENARIOS = {
    "killed": Scenario("killed", "replicas on Ray Serve are killed under load"),
    "starved-replica": Scenario("starved_replica", "a replica on Ray Serve may take no more memory"),
    "disconnects": Scenario("disconnects", "clients leave at random moments, deadlines are milliseconds"),
    "malformed": Scenario("malformed", "10,000 bodies that are wrong, and requests that are none"),
    "slow-clients": Scenario("slow_clients", "clients send and read a byte a second"),
    "clock": Scenario("clock", "the wall clock jumps by an hour and a day, there and back"),
    "full-disk": Scenario("full_disk", "no room to save the prefix cache"),
    "out-of-memory": Scenario("out_of_memory", "the server may take no more memory"),
    "replaced-plan": Scenario("replaced_plan", "the plan is replaced, moved, built over, written over"),
}
