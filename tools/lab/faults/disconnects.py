"""Clients that leave at random moments, and deadlines that come too soon: nothing stays after them."""

from __future__ import annotations

from outrider.tools.lab.faults.crowd import Crowd, Ways
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.setting import Setting


def run(setting: Setting, figures: Figures) -> None:
    """Half of the clients' requests are left, a fifth of the others have milliseconds."""
    ways = Ways(streams=0.6, leaves=0.5, deadlines=0.2)
    with setting.serve() as server, setting.watched(server, figures):
        with Crowd(server.port, setting.questions, figures, setting.clients, setting.seed, ways):
            for spent in setting.until():
                setting.tell(f"{figures.cut} of {figures.sent} cut off after {spent:.0f} s")
        figures.faults = figures.cut
        figures.check(figures.cut, "No request was cut off.")
