"""A replica on Ray Serve may take no more memory: it dies, fails or hangs, and its requests continue on other replicas.

One that hangs is replaced by Ray once it has missed three health checks, and has had its time to drain: its requests
wait so long.
"""

from __future__ import annotations

from time import sleep

from outrider.tools.lab.faults.crowd import Crowd, Ways, ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.out_of_memory import limit_memory
from outrider.tools.lab.faults.replicas import replicas_of
from outrider.tools.lab.faults.setting import Setting

_REPLICAS = 3
_PATIENCE = 300.0  # seconds: three health checks of 15 s that are missed, 40 s to drain, and a machine that is busy


def run(setting: Setting, figures: Figures) -> None:
    """The limit (RLIMIT_AS) is set under load, on one replica, and stays."""
    draw = setting.draw("starved")
    with replicas_of(setting, _REPLICAS) as replicas:
        figures.check(replicas.wait(_REPLICAS), "Not all replicas begin.")
        ask_all(replicas.server.port, setting.questions, figures, setting.clients)
        victim = draw.choice(replicas.serving())
        ways = Ways(patience=_PATIENCE)
        with Crowd(replicas.server.port, setting.questions, figures, setting.clients, setting.seed, ways) as crowd:
            sleep(setting.seconds / 4)
            limit_memory(victim, 0)
            figures.count("faults")
            for spent in setting.until():
                setting.tell(f"{figures.sent} requests, {spent:.0f} s")
        replicas.end_well(setting, figures)
        figures.check(victim not in replicas.serving(), "The replica without memory was not replaced.")
    figures.notes["longest wait, s"] = round(max(crowd.waits), 1)
