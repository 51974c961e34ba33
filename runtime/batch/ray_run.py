"""A batch on a cluster of Ray: actors that load the plan once each, and write a block of results a task.

Ray Data has the actors, gives each two blocks, and another for each that is written; it restarts those that die, and
gives their blocks again. The folder is the same for all nodes: what is answered is not computed again when actors die.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa

from outrider.plans.errors import OutriderError, PlanError, RequestError
from outrider.runtime.batch.answering import Answering, FinishedRequests
from outrider.runtime.batch.folder import KEPT, BatchFolder, BatchState
from outrider.runtime.batch.loading import LoadOptions, check_loaded, check_visible, load_for_batches
from outrider.runtime.batch.requests import BatchRequest

_TRIES = 4  # of a block whose actor dies
_AT_ONCE = 2  # blocks of an actor: while the last requests of one run, those of the next take their places

_Numbered = tuple[int, Sequence[BatchRequest]]


def room_for(count: int | None, cpus: int) -> int:
    """Return how many actors of `cpus` CPUs to have: `count`, or all that the cluster has room for.

    Raises RequestError where it has no room for these.
    """
    import ray

    all_cpus = int(ray.cluster_resources().get("CPU", 0))
    room = all_cpus // cpus
    if room < (count or 1):
        raise RequestError(
            f"The cluster has {all_cpus} CPUs, room for {room} actors of {cpus}; pass fewer --actors, or fewer "
            "--cpus-per-actor."
        )
    return count or room


def run_on_ray(
    plan: Path,
    folder: BatchFolder,
    state: BatchState,
    blocks: Mapping[int, Sequence[BatchRequest]],
    count: int,
    cpus: int,
    load: LoadOptions,
) -> Generator[FinishedRequests, None, None]:
    """Have `count` actors of `cpus` CPUs answer the blocks; yields each as it is written.

    Raises RequestError and PlanError as actors found them, and PlanError where a block's actor dies again and again.
    """
    import ray.data
    from ray.exceptions import RayError

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    tables = [
        pa.table(
            {
                "block": [number] * len(block),
                "custom_id": [request.custom_id for request in block],
                "text": [request.text for request in block],
            }
        )
        for number, block in _dealt(list(blocks.items()), count)
    ]
    settings = {"plan": str(plan.absolute()), "folder": str(folder.path.absolute()), "state": state, "load": dict(load)}
    written = ray.data.from_arrow(tables).map_batches(
        _BlockWriter,
        fn_constructor_kwargs=settings,
        batch_size=None,  # a block each task
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=min(count, len(tables)),
            max_tasks_in_flight_per_actor=_AT_ONCE,
            max_concurrent_calls_per_actor=_AT_ONCE,
            enable_true_multi_threading=True,
        ),
        num_cpus=cpus,
    )
    try:
        for row in written.iter_rows():
            if row["error"]:
                raise (RequestError if row["request"] else PlanError)(row["error"])
            yield FinishedRequests(row["requests"], row["new_tokens"], row["began"])
    except RayError as error:
        raise PlanError(f"Ray lost a block: {str(error).strip().splitlines()[-1].rstrip('.')}. {KEPT}") from None


def _dealt(blocks: Sequence[_Numbered], count: int) -> list[_Numbered]:
    """Blocks in the order in which `count` actors take them: each continues with the neighbours of what it had, whose
    prompts begin alike, as long as they keep step."""
    share = -(-len(blocks) // count)
    hands = [blocks[start : start + share] for start in range(0, len(blocks), share)]
    return [block for turn in zip_longest(*hands) for block in turn if block is not None]


class _BlockWriter:
    """An actor. It returns mistakes as rows: an exception would come with Ray's own words about it."""

    def __init__(self, plan: str, folder: str, state: BatchState, load: LoadOptions) -> None:
        self._folder, self._error = BatchFolder(Path(folder)), None
        try:
            check_visible(Path(plan), "plan.json")
            check_visible(Path(folder), "batch.json")
            if self._folder.state() != state:
                raise RequestError(f"{folder} has another batch on this node; pass a folder that all nodes share.")
            runtime = load_for_batches(plan, **load)
            check_loaded(runtime, plan, state)
            self._answering = Answering(runtime, state.model, state.created)
        except (OutriderError, OSError) as error:
            self._error = error

    def __call__(self, table: pa.Table) -> pa.Table:
        began, rows = time.time(), table.to_pylist()
        number = rows[0]["block"]
        requests = [BatchRequest(row["custom_id"], row["text"]) for row in rows]
        tokens, error = 0, self._error
        if error is None and number not in self._folder.written():
            try:
                tokens = self._run(number, requests)
            except OSError as fault:
                error = PlanError(f"{fault.filename or self._folder.path}: {fault.strerror or fault}. {KEPT}")
            except OutriderError as fault:
                error = fault
        done = {"requests": len(rows), "new_tokens": tokens, "began": began}
        wrong = {"error": str(error or ""), "request": isinstance(error, RequestError)}
        return pa.Table.from_pylist([done | wrong])

    def _run(self, number: int, requests: Sequence[BatchRequest]) -> int:
        """Answer what actors before have left of a block, write it, and return how many tokens were computed.

        Raises PlanError where its actors have died of it.
        """
        tokens = 0
        with self._folder.beginning(number) as (tries, lines, file):
            if tries > _TRIES:
                raise PlanError(
                    f"{_TRIES} actors died while they computed block {number}, which begins with request "
                    f"{requests[0].custom_id!r}: they may have too little memory; use fewer actors on a node, or a "
                    "smaller --max-running or --cache-bytes."
                )
            left = [request for request in requests if request.custom_id not in lines]
            with closing(self._answering.answer(left)) as answers:
                for answered in answers:
                    line = lines[answered.request.custom_id] = answered.line
                    file.write(line)
                    file.flush()  # to the system, which outlives this process
                    tokens += answered.new_tokens
        self._folder.write(number, [lines[request.custom_id] for request in requests])
        return tokens
