"""How long rounds of a session take: by the wall clock, and by the device's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

from runtime import Session
from runtime.backends.cuda_driver import CudaDevice
from runtime.request import Options

_WARM_ROUNDS = 2  # the first computes the prompt, and may be plain for that


def decode(session: Session, prompt: list[int], drafter: str, new: int) -> dict[str, Any]:
    """Return figures of the rounds after the first two. What of a round is not `device_ms` is the host's alone."""
    options = Options(max_new_tokens=new, ignore_eos=True, auto_disable=False, drafter=drafter)
    session.reset()
    count = rounds = 0
    with closing(session.stream(prompt, **options)) as stream:
        for _ in range(_WARM_ROUNDS):
            next(stream, None)
        with device_clock(session) as on_device:
            started = perf_counter()
            for span in stream:
                count += len(span.token_ids)
                rounds += bool(span.token_ids)
            seconds = perf_counter() - started
    round_ms, device_ms = 1000 * seconds / max(rounds, 1), sum(on_device) / max(rounds, 1)
    return {
        "tokens_per_second": count / seconds,
        "tokens_per_verify": count / max(rounds, 1),
        "round_ms": round_ms,
        "device_ms": device_ms,
        "host_ms": round_ms - device_ms,
    }


@contextmanager
def device_clock(session: Session) -> Iterator[list[float]]:
    """Milliseconds on the device of every program that runs meanwhile, known at the end."""
    times: list[float] = []
    device = getattr(session.buffers, "device", None)
    if not isinstance(device, CudaDevice):
        yield times
        return
    marks: list[tuple[Any, Any]] = []

    def timed(enqueue: Callable[..., object]) -> Callable[..., object]:
        def both(*arguments: object) -> object:
            begun = device.timed_mark()
            found = enqueue(*arguments)
            marks.append((begun, device.timed_mark()))
            return found

        return both

    with ExitStack() as stack:
        for program in session.programs.values():
            enqueue = "launch" if program.launches else "run"  # what may be launched is, also by `run`
            stack.enter_context(patch.object(program, enqueue, timed(getattr(program, enqueue))))
        yield times
    times += [device.milliseconds(*pair) for pair in marks]


def launches(session: Session, program: str) -> int:
    """Return what the host enqueues for a recorded round: stretches that are one graph, and engines that are one."""
    return len([name for name in session.programs[program].stage_names if name not in ("prepare", "sent", "wait")])
