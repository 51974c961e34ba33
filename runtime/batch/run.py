"""A run of the command `batch`: reads the requests, answers those that have no result yet, and reports."""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from math import inf
from time import perf_counter, time

from outrider.commands.console import Update, print_json, progress_bar, stderr
from outrider.commands.packages import optional_packages
from outrider.plans.backends import BACKENDS
from outrider.plans.errors import OutriderError, RequestError
from outrider.plans.plan import open_plan
from outrider.runtime.backends import choose_backend
from outrider.runtime.batch.answering import Answering, FinishedRequests, run_blocks
from outrider.runtime.batch.folder import KEPT, BatchFolder, BatchState, Totals, block_bounds, default_block_size
from outrider.runtime.batch.loading import LoadOptions, check_loaded, load_for_batches
from outrider.runtime.batch.reading import read_requests
from outrider.runtime.batch.requests import BatchRequest, digest, working_order
from outrider.runtime.cli.arguments import cache_of, report_loading
from outrider.runtime.exactness import kernels_here

Blocks = Mapping[int, Sequence[BatchRequest]]

_EPOCH = "SOURCE_DATE_EPOCH"


def run_batch(arguments: argparse.Namespace) -> int:
    """Answer a file of requests into a folder; the exit status."""
    with optional_packages("Reading parquet", "ray"):
        requests = read_requests(arguments.requests)
    if arguments.ray is not None:
        with optional_packages("A batch on a cluster", "ray"):
            import_module("ray.data")
    began, folder, ordered = perf_counter(), BatchFolder(arguments.out), working_order(requests)
    try:
        with folder.begun(_state(arguments, ordered)) as state:
            blocks = [ordered[start:stop] for start, stop in block_bounds(state.count, state.block_size)]
            there = set(range(len(blocks))) if folder.results.exists() else folder.written()
            missing = {number: block for number, block in enumerate(blocks) if number not in there}
            work = _work(arguments, folder, state, missing) if missing else _Work(len(ordered), 0)
            totals = folder.finish(blocks)
    except OSError as error:
        raise OutriderError(f"{error.filename or arguments.out}: {error.strerror or error}. {KEPT}") from None
    except KeyboardInterrupt:
        stderr.print(KEPT, style="dim", soft_wrap=True)
        raise
    _report(arguments, folder, totals, work, perf_counter() - began)
    return 0


@dataclass
class _Work:
    """A run: of `total` requests it computes those that are `missing`; and its sums so far."""

    total: int
    missing: int
    computed: int = 0
    new_tokens: int = 0
    began: float = inf  # of the first request, by `time.time()`; the plan is loaded then
    seconds: float = 0.0  # since then

    def add(self, done: FinishedRequests) -> None:
        self.computed += done.requests
        self.new_tokens += done.new_tokens
        self.began = min(self.began, done.began)
        self.seconds = time() - self.began

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def show(self, update: Update) -> None:
        written = self.total - self.missing + self.computed
        if not self.computed:
            update(written, self.total)
            return
        left = self.seconds * (self.missing - self.computed) / self.computed
        update(written, self.total, f"{self.tokens_per_second:.0f} tokens/s", left)


def _work(arguments: argparse.Namespace, folder: BatchFolder, state: BatchState, missing: Blocks) -> _Work:
    """Answer the blocks that are missing, and write them to the folder."""
    work = _Work(state.count, sum(map(len, missing.values())))
    run = _in_process if arguments.ray is None else _on_ray
    bar = nullcontext(lambda *_: None) if arguments.quiet else progress_bar("requests")
    with closing(run(arguments, folder, state, missing)) as running, bar as update:
        work.show(update)
        for done in running:
            work.add(done)
            work.show(update)
    return work


def _state(arguments: argparse.Namespace, ordered: Sequence[BatchRequest]) -> BatchState:
    """What the results depend on. The plan is looked at here, and loaded later."""
    manifest = open_plan(arguments.plan, verify=False).manifest
    return BatchState(
        plan=manifest.identity,
        requests=digest(ordered),
        model=arguments.model_name or manifest.name,
        created=_created(),
        backend=choose_backend(manifest.backends, arguments.backend).backend,
        kernels=kernels_here(),
        count=len(ordered),
        block_size=arguments.block_size or default_block_size(len(ordered), manifest.target.branches),
    )


def _created() -> int:
    """The time in answers, as reproducible builds have it: 0, or that of the environment."""
    given = os.environ.get(_EPOCH, "0")
    if not (given.isascii() and given.isdigit() and len(given) < 19):
        raise RequestError(f"{_EPOCH} is {given!r}; set it to seconds since 1970, or unset it.")
    return int(given)


def _in_process(
    arguments: argparse.Namespace, folder: BatchFolder, state: BatchState, blocks: Blocks
) -> Generator[FinishedRequests, None, None]:
    options = _load_options(arguments, arguments.backend, arguments.threads)
    options["share_memory"] = False
    with stderr.status(f"loading {arguments.plan}"):
        runtime = load_for_batches(arguments.plan, **options)
    try:
        report_loading(runtime)
        check_loaded(runtime, arguments.plan, state)
        answering, began = Answering(runtime, state.model, state.created), time()
        with closing(run_blocks(answering, folder, blocks)) as answers:
            for answered in answers:
                yield FinishedRequests(1, answered.new_tokens, began)
    finally:
        runtime.close(drain=False)


def _on_ray(
    arguments: argparse.Namespace, folder: BatchFolder, state: BatchState, blocks: Blocks
) -> Generator[FinishedRequests, None, None]:
    if not BACKENDS[state.backend].on_processor:
        raise RequestError(
            f"The backend {state.backend} is not the CPU's, and actors ask Ray for CPUs alone; run without --ray, or "
            "with --backend of the CPU."
        )
    from outrider.runtime.batch.ray_run import room_for, run_on_ray
    from outrider.runtime.ray_cluster import cluster

    cpus = arguments.cpus_per_actor or arguments.threads or 1
    options = _load_options(arguments, state.backend, arguments.threads or cpus)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what is worth a word is an exception, too
    with cluster(None if arguments.ray == "local" else arguments.ray, (arguments.actors or 1) * cpus):
        count = room_for(arguments.actors, cpus)
        yield from run_on_ray(arguments.plan, folder, state, blocks, count, cpus, options)


def _load_options(arguments: argparse.Namespace, backend: str | None, threads: int) -> LoadOptions:
    return {
        "backend": backend,
        "threads": threads,
        "exactness": arguments.exactness,
        "cuda_graphs": not arguments.no_cuda_graphs,
        "max_running": arguments.max_running,
        "prefix_cache": cache_of(arguments),
    }


def _report(arguments: argparse.Namespace, folder: BatchFolder, totals: Totals, work: _Work, seconds: float) -> None:
    if arguments.json:
        report = {"results": str(folder.results), **asdict(totals), "computed": work.computed}
        report |= {"new_tokens": work.new_tokens, "seconds": round(seconds, 3)}
        report |= {"working_seconds": round(work.seconds, 3), "tokens_per_second": round(work.tokens_per_second, 1)}
        print_json(report)
        return
    print(folder.results)
    counts = f"{totals.succeeded} answers, {totals.failed} refused; {work.computed} computed now, {work.new_tokens} new"
    stderr.print(f"{counts} tokens in {work.seconds:.1f} s", style="dim", soft_wrap=True)
