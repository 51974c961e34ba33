"""A batch on a cluster of Ray: actors that load the plan once each, and write a block of results a task.

Ray Data has the actors, gives each a block when it is free, restarts those that die and gives their block again. The
folder is the same for all nodes: what an actor has written is not computed again, whoever dies.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError

from plans.errors import OutriderError, PlanError, RequestError
from runtime.batch.answering import Answering
from runtime.batch.folder import BatchFolder, BatchState
from runtime.batch.loading import LoadOptions, load_for_batches
from runtime.batch.local import run_blocks
from runtime.batch.predictor import check_visible
from runtime.batch.processors import foreign_kernels, told_foreign
from runtime.batch.requests import BatchRequest

_TRIES = 3  # of a block whose actor dies, behind the first
_STORE = 200 * 2**20  # bytes of objects in a cluster of our own: requests alone go through it


@dataclass(frozen=True)
class Actors:
    """How many actors there are at most, and the CPUs of each. `count` None: as many as the cluster has room for."""

    count: int | None
    cpus: int


@dataclass(frozen=True)
class BlockDone:
    """A block that is written, and what it took."""

    block: int
    requests: int
    new_tokens: int


@contextmanager
def cluster(address: str, actors: Actors) -> Iterator[int]:
    """Connect to the cluster at `address`, or begin one of this machine's for "local"; yields the number of actors.

    Raises RequestError where there is none, or it has too few CPUs.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        cpus = max(os.cpu_count() or 1, (actors.count or 1) * actors.cpus)
        quiet |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _STORE}
    try:
        ray.init(address, **quiet)
    except (ConnectionError, ValueError, RayError, RuntimeError) as error:
        raise RequestError(f"There is no cluster of Ray at {address!r}: {error}") from None
    try:
        room = int(ray.cluster_resources().get("CPU", 0)) // actors.cpus
        if room < (actors.count or 1):
            raise RequestError(
                f"The cluster has {int(ray.cluster_resources().get('CPU', 0))} CPUs, room for {room} actors of "
                f"{actors.cpus}; pass fewer --actors, or fewer --cpus-per-actor."
            )
        yield actors.count or room
    finally:
        ray.shutdown()


def run_on_ray(
    plan: Path,
    folder: BatchFolder,
    state: BatchState,
    blocks: Mapping[int, Sequence[BatchRequest]],
    count: int,
    cpus: int,
    load: LoadOptions,
) -> Iterator[BlockDone]:
    """Have `count` actors of `cpus` CPUs answer the blocks; yields each as it is written.

    Raises RequestError and PlanError as actors found them, and PlanError where a block's actor dies again and again.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    tables = [
        pa.table(
            {
                "block": [number] * len(block),
                "custom_id": [request.custom_id for request in block],
                "text": [request.text for request in block],
            }
        )
        for number, block in blocks.items()
    ]
    settings = {"plan": str(plan.absolute()), "folder": str(folder.path.absolute()), "state": state, "load": dict(load)}
    written = ray.data.from_arrow(tables).map_batches(
        _BlockWriter,
        fn_constructor_kwargs=settings,
        batch_size=None,  # a block each task
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(count, len(tables)), max_tasks_in_flight_per_actor=1),
        num_cpus=cpus,
        max_restarts=-1,
        max_task_retries=_TRIES,
    )
    try:
        for row in written.iter_rows():
            if row["error"]:
                raise (RequestError if row["request"] else PlanError)(row["error"])
            yield BlockDone(row["block"], row["requests"], row["new_tokens"])
    except RayError as error:
        raise PlanError(f"Ray gave up a block: {str(error).strip().splitlines()[-1]}") from None


class _BlockWriter:
    """An actor. It tells mistakes as rows: an exception would come with Ray's own words about it."""

    def __init__(self, plan: str, folder: str, state: BatchState, load: LoadOptions) -> None:
        self._folder, self._error = BatchFolder(Path(folder)), None
        try:
            check_visible(Path(plan), "plan.json")
            check_visible(Path(folder), "batch.json")
            if self._folder.state() != state:
                raise RequestError(f"{folder} has another batch on this node; pass a folder that all nodes share.")
            runtime = load_for_batches(plan, **load)
            if runtime.manifest.identity != state.plan:
                raise RequestError(f"{plan} is another plan on this node; put the same one there.")
            if foreign := foreign_kernels(runtime.manifest, runtime.backend, state.kernels):
                raise RequestError(told_foreign(foreign))
            self._answering = Answering(runtime, state.model, state.created)
        except (OutriderError, OSError) as error:
            self._error = error

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        number = rows[0]["block"]
        requests = [BatchRequest(row["custom_id"], row["text"]) for row in rows]
        tokens, error = 0, self._error
        if error is None and number not in self._folder.written():
            try:
                tokens = sum(each.new_tokens for each in run_blocks(self._answering, self._folder, {number: requests}))
            except OSError as fault:
                error = PlanError(f"{self._folder.path} cannot be written: {fault}")
            except OutriderError as fault:
                error = fault
        done = {"block": number, "requests": len(rows), "new_tokens": tokens}
        wrong = {"error": str(error or ""), "request": isinstance(error, RequestError)}
        return pa.Table.from_pylist([done | wrong])
