"""Batches on a cluster of Ray of two nodes: the bytes of one process, also when actors die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from outrider.plans.errors import PlanError, RequestError
from outrider.plans.plan import open_plan
from outrider.runtime.__main__ import main
from outrider.runtime.batch.folder import BatchFolder, BatchState, block_bounds
from outrider.runtime.batch.reading import read_requests
from outrider.runtime.batch.requests import BatchRequest, digest, working_order
from outrider.runtime.exactness import kernels_here
from tests.integration.batches import mixed, run, write

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="the system does not list processes in /proc")
from outrider.runtime.batch.ray_run import _BlockWriter, run_on_ray  # noqa: E402
from outrider.runtime.ray_cluster import cluster  # noqa: E402
from tests.integration.ray_cluster import cluster_of_two, processes  # noqa: E402


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster_of_two(cpus=1) as nodes:
        yield nodes.address


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("batch") / "requests.jsonl", mixed(48))


@pytest.fixture(scope="module")
def results(branch_plan: Path, requests: Path) -> bytes:
    return run(branch_plan, requests, requests.parent / "results")


def an_actor() -> int:
    """A process that writes blocks."""
    return next(each.pid for each in processes() if "BlockWriter" in " ".join(each.cmdline()))


def begun(plan: Path, requests: Path, size: int) -> tuple[BatchState, dict[int, list[BatchRequest]]]:
    """The state and the blocks of a batch."""
    ordered, manifest = working_order(read_requests(requests)), open_plan(plan).manifest
    state = BatchState(
        manifest.identity, digest(ordered), manifest.name, 0, "onnxruntime-cpu", kernels_here(), len(ordered), size
    )
    return state, {n: ordered[start:stop] for n, (start, stop) in enumerate(block_bounds(len(ordered), size))}


@pytest.mark.long  # Ray itself takes 35 s of a processor for it
@pytest.mark.parametrize("count", [1, 2])
def test_actors_write_the_bytes_of_one_process(
    count: int, address: str, branch_plan: Path, requests: Path, results: bytes, tmp_path: Path
) -> None:
    found = run(branch_plan, requests, tmp_path / "out", "--ray", address, "--actors", str(count), "--block-size", "8")
    assert found == results
    assert not ray.is_initialized()


@pytest.mark.long
def test_an_actor_that_is_killed_costs_what_runs_and_changes_nothing(
    address: str, branch_plan: Path, requests: Path, results: bytes, tmp_path: Path
) -> None:
    state, blocks = begun(branch_plan, requests, 6)
    folder, computed, kept = BatchFolder(tmp_path / "out"), 0, dict[str, bytes]()
    parts = tmp_path / "out" / "parts"
    before: dict[Path, int] = {}
    with folder.begun(state), cluster(address, 1):
        for done in run_on_ray(branch_plan, folder, state, blocks, 1, 1, {"threads": 1, "max_running": 1}):
            computed += done.new_tokens
            if not before:
                until = time.monotonic() + 60
                while not kept:  # the actor continues with the next blocks, of which it has a part when it dies
                    assert time.monotonic() < until
                    os.kill(actor := an_actor(), signal.SIGSTOP)
                    kept = begun_lines(parts)
                    os.kill(actor, signal.SIGKILL if kept else signal.SIGCONT)
                before = {part: part.stat().st_mtime_ns for part in parts.glob("*.jsonl")}
        assert {part: part.stat().st_mtime_ns for part in before} == before
        totals = folder.finish(list(blocks.values()))
    assert folder.results.read_bytes() == results
    saved = sum(json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in kept.values())
    assert 0 < computed <= totals.completion_tokens - saved


def begun_lines(parts: Path) -> dict[str, bytes]:
    """Results by id of blocks that are not written yet."""
    lines = [line for part in parts.glob("*.begun") for line in part.read_bytes().splitlines() if line.endswith(b"}")]
    return {json.loads(line)["custom_id"]: line for line in lines}


def test_an_actor_continues_a_block_where_the_one_before_it_died(
    branch_plan: Path, requests: Path, results: bytes, tmp_path: Path
) -> None:
    state, blocks = begun(branch_plan, requests, 24)
    folder = BatchFolder(tmp_path / "out")
    of_id = {json.loads(line)["custom_id"]: line for line in results.splitlines()}
    first = [of_id[request.custom_id] for request in blocks[0]]
    with folder.begun(state), folder.beginning(0) as (tries, lines, file):
        assert (tries, lines) == (1, {})
        file.write(b"\n".join(first[:10]) + b"\n" + first[10][:-9])  # cut off by a kill
    with folder.begun(state):  # of the run as well: another one continues, and counts its own actors
        assert b"\n.\n" not in (folder.path / "parts" / "000000.begun").read_bytes()
        write_block = _BlockWriter(str(branch_plan), str(folder.path), state, {"threads": 1, "share_memory": False})
        columns = {name: [getattr(each, name) for each in blocks[0]] for name in ("custom_id", "text")}
        (row,) = write_block(pa.table({"block": [0] * 24} | columns)).to_pylist()
        assert row["error"] == ""
        usages = [json.loads(line)["response"]["body"]["usage"] for line in first[10:]]
        assert row["new_tokens"] == sum(usage["completion_tokens"] for usage in usages)
        assert (folder.path / "parts" / "000000.jsonl").read_bytes().splitlines() == first
        assert not list(folder.path.glob("parts/*.begun"))


@pytest.mark.long
def test_a_block_whose_actors_die_and_a_node_that_does_not_see_the_plan_end_the_run(
    address: str, branch_plan: Path, requests: Path, tmp_path: Path
) -> None:
    state, blocks = begun(branch_plan, requests, 48)
    folder, elsewhere = BatchFolder(tmp_path / "out"), BatchFolder(tmp_path / "elsewhere")
    with folder.begun(state), cluster(address, 1):
        for number in range(4):
            with folder.beginning(0) as (tries, _, _):
                assert tries == number + 1
        for plan, where, error, said in (
            (
                branch_plan,
                folder,
                PlanError,
                "4 actors died while they computed block 0, which begins with request 'req",
            ),
            (tmp_path / "nowhere", folder, RequestError, r"does not see .*/nowhere/plan.json; put it where every node"),
            (branch_plan, elsewhere, RequestError, r"does not see .*/elsewhere/batch.json"),
        ):
            with pytest.raises(error, match=said):
                list(run_on_ray(plan, where, state, blocks, 1, 1, {"threads": 1}))


def test_a_cluster_that_is_not_there_or_too_small_is_refused(
    address: str, branch_plan: Path, requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["batch", str(branch_plan), str(requests), "--out", str(tmp_path / "out"), "--quiet", "--ray"]
    for options, said in (
        (["127.0.0.1:1"], "--ray is '127.0.0.1:1', where no Ray cluster can be reached"),
        ([address, "--actors", "3"], "The cluster has 2 CPUs, room for 2 actors of 1"),
        ([address, "--cpus-per-actor", "3"], "room for 0 actors of 3"),
    ):
        assert main([*command, *options]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.long
def test_the_predictor_maps_batches_of_a_dataset(
    address: str, branch_plan: Path, requests: Path, results: bytes
) -> None:
    from outrider.runtime.batch import OutriderPredictor

    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    expected = {json.loads(line)["custom_id"]: json.loads(line) for line in results.splitlines()}
    with cluster(address, 2):
        asked = [{"custom_id": row["custom_id"], "body": json.dumps(row["body"]), "url": row["url"]} for row in rows]
        dataset = ray.data.from_items([row | {"method": "POST"} for row in asked])
        load = {"plan": str(branch_plan), "threads": 1}
        answered = dataset.map_batches(OutriderPredictor, fn_constructor_kwargs=load, concurrency=2, batch_size=16)
        found = answered.take_all()
    assert {row["custom_id"]: json.loads(row["result"]) for row in found} == expected
    assert np.all([row["status_code"] == 200 for row in found])
