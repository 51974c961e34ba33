"""Our own engine: plain decoding, and every drafter of the plan."""

from __future__ import annotations

import onnxruntime

from outrider import Runtime
from outrider.runtime.options.options import Options
from outrider.tools.lab.peers.engine import Clock, Generated, Settings
from outrider.tools.parting import Parting, find_parting

BACKEND = "onnxruntime-cpu"
PLAIN = "none"


class Outrider:
    def __init__(self, settings: Settings) -> None:
        runtime = Runtime.load(settings.plan, backend=BACKEND, threads=settings.threads)
        self.version = f"onnxruntime {onnxruntime.__version__}"
        self.modes = (PLAIN, *(drafter.name for drafter in runtime.manifest.drafters))
        self.missing: dict[str, str] = {}
        self._session = runtime.session()

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        self._session.reset()
        clock, found = Clock(), list[int]()
        for span in self._session.stream(ids, drafter=mode, max_new_tokens=new, ignore_eos=True):
            clock.count(len(span.token_ids))
            found += span.token_ids
        return clock.generated(found, clock.done())

    def part(self, number: int, ids: list[int], plain: list[int], other: list[int]) -> Parting | None:
        """Where `other` leaves our plain decoding of the prompt of this `number`."""
        return find_parting(self._session, number, ids, Options(), plain, other)
