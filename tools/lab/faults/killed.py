"""Replicas on Ray Serve are killed (SIGKILL) at random under load; their requests continue on others."""

from __future__ import annotations

from time import monotonic, sleep

from outrider.tools.lab.faults.crowd import Crowd, Ways, ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.replicas import replicas_of
from outrider.tools.lab.faults.server import held_by
from outrider.tools.lab.faults.setting import Setting, compare

_SECONDS_A_KILL = 90.0  # on average: 20 kills in 30 minutes
_REPLICAS = 3
_FEW = 5  # kills, which may all come to idle replicas


def run(setting: Setting, figures: Figures) -> None:
    """Kills come at random moments of equal slots; each takes one of the replicas that serve, the last one too."""
    draw, kills = setting.draw("killed"), max(2, round(setting.seconds / _SECONDS_A_KILL))
    slot = setting.seconds / kills
    moments = [slot * (place + draw.random()) for place in range(kills)]
    with replicas_of(setting, _REPLICAS) as replicas:
        figures.check(replicas.wait(_REPLICAS), "Not all replicas begin.")
        ask_all(replicas.server.port, setting.questions, figures, setting.clients, rounds=2)
        before = held_by(replicas.ingress())
        with Crowd(replicas.server.port, setting.questions, figures, setting.clients, setting.seed, Ways()):
            began = monotonic()
            for moment in moments:
                while (spent := monotonic() - began) < moment:
                    setting.tell(f"{figures.faults} of {kills} kills, {figures.sent} requests, {spent:.0f} s")
                    sleep(min(1.0, moment - spent))
                if replicas.wait(1):
                    replicas.kill(draw.choice(replicas.serving()))
                    figures.count("faults")
            sleep(max(0.0, setting.seconds - (monotonic() - began)))
        replicas.end_well(setting, figures)
        after = held_by(replicas.ingress())
    figures.check(figures.faults == kills, f"{figures.faults} of {kills} kills came to a replica.")
    figures.check(figures.retried or kills < _FEW, "No request was under way on a replica that was killed.")
    figures.notes |= {"at, s": [round(moment) for moment in moments], "seed": setting.seed}
    compare(figures, before, after)
