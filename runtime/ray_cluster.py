"""The Ray cluster that a command works on: one that is named, or one of this machine alone that ends with it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from math import ceil

from outrider.plans.errors import RequestError

_CONNECTING = 5.0  # seconds
_TERMINATED = 128 + 15  # the status of a command that SIGTERM has ended
_STORE = 200 * 2**20  # bytes of Ray's object store on this machine: requests and answers alone go through it


@contextmanager
def cluster(address: str | None, cpus: float) -> Iterator[None]:
    """Be in the cluster at `address`, or in one of this machine that is taken to have at least `cpus` CPUs.

    SIGTERM ends the command in order from then on. Raises RequestError where no cluster can be reached.
    """
    import ray
    from ray.exceptions import RayError

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if address is not None:
        try:
            _look(address)
            with _sigterm_blocked():
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, RayError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"--ray is {address!r}, where no Ray cluster can be reached: {error}; start one there with "
                "`ray start --head`."
            ) from None
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        with _sigterm_blocked():
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, ceil(cpus)),
                object_store_memory=_STORE,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
    with redirect_stdout(sys.stderr):  # what Ray says, at its end too, is no result of a command
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in processes started meanwhile and in their children: service managers send it to the whole process
    group, and the command has to shut them down in order.

    One that comes meanwhile ends the command then, by a handler of its own: Ray's aborts, and prints stacks.
    """
    has_groups = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]) if has_groups else set()
    try:
        yield
    finally:
        with suppress(ValueError):  # not in the main thread, which alone has handlers; Ray has set none there either
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
        if has_groups:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _look(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECTING).close()
