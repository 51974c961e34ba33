"""A plan that changes while it is loaded or in use."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.place import Place
from outrider.plans.errors import PlanError
from outrider.runtime.beam_search import beam_search
from outrider.runtime.files import MappedFiles
from outrider.runtime.step_loop_pool import StepLoopPool
from outrider.tools.lab.faults.replaced_plan import copy_plan, write_over, write_successor
from tests.conftest import call_before
from tests.integration.served import client_of, get, listening

PROMPT = "import os\n"
WRITTEN = "weights.bin was written to while the plan is in use.* Load the plan again; and to replace one, build or copy"


@pytest.fixture
def plan(branch_plan: Path, tmp_path: Path) -> Path:
    return copy_plan(branch_plan, tmp_path / "plan")


@pytest.fixture(scope="module")
def other(branch_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_successor(branch_plan, tmp_path_factory.mktemp("other") / "plan", 1)


@pytest.mark.parametrize(
    "replace",
    [
        lambda plan, other: Place(plan).put(copy_plan(other, plan.with_name("new"))),
        lambda plan, _: plan.rename(plan.with_name("away")),
        lambda plan, _: shutil.rmtree(plan),
    ],
    ids=["replaced", "moved", "removed"],
)
def test_a_loaded_plan_outlives_its_folder(plan: Path, other: Path, replace: Callable[[Path, Path], object]) -> None:
    runtime = Runtime.load(plan, threads=1)
    before = runtime.generate(PROMPT, max_new_tokens=20).token_ids
    replace(plan, other)
    assert runtime.submit(PROMPT, max_new_tokens=20).result(60).token_ids == before
    assert runtime.generate(PROMPT, max_new_tokens=20).token_ids == before
    if plan.exists():
        newer = Runtime.load(plan, threads=1)
        assert newer.manifest.identity != runtime.manifest.identity
        assert newer.generate(PROMPT, max_new_tokens=20).token_ids != before
    assert runtime.close(timeout=60)


def test_a_plan_that_is_written_over_is_refused(plan: Path, other: Path) -> None:
    runtime = Runtime.load(plan, threads=1)
    with listening(runtime) as address, client_of(address) as client:
        stream = client.completions.create(
            model="toy", prompt=PROMPT, max_tokens=140, stream=True, extra_body={"ignore_eos": True, "drafter": "none"}
        )
        next(iter(stream))
        write_over(plan, other)
        with pytest.raises(Exception, match=WRITTEN):
            list(stream)
        with pytest.raises(Exception, match=WRITTEN) as refused:
            client.completions.create(model="toy", prompt=PROMPT)
        assert refused.value.status_code == 500  # type: ignore[attr-defined]
        assert get(f"{address}/health")[0] == 200
    assert runtime.scheduler_stats.running == runtime.scheduler_stats.waiting == 0


def test_sessions_streams_and_searches_end_where_the_plan_is_written_over(plan: Path, other: Path) -> None:
    runtime = Runtime.load(plan, threads=1)
    session, searched = runtime.session(), runtime.session()
    session.generate(PROMPT, max_new_tokens=5, drafter="none")
    stream = runtime.stream(PROMPT, max_new_tokens=50, ignore_eos=True, drafter="none")
    next(iter(stream))
    write_over(plan, other)
    for ask in (
        lambda: session.generate("x", max_new_tokens=5),
        lambda: list(stream),
        lambda: beam_search(searched, PROMPT, beams=2, max_new_tokens=5),
        lambda: runtime.generate(PROMPT),
    ):
        with pytest.raises(PlanError, match=WRITTEN):
            ask()


def test_a_plan_that_is_replaced_while_it_is_loaded_is_refused(
    plan: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = copy_plan(other, plan.with_name("new"))
    call_before(monkeypatch, MappedFiles, "from_plan", lambda *_: Place(plan).put(newer))
    with pytest.raises(PlanError, match="was replaced while it was loaded; load it again"):
        Runtime.load(plan, threads=1)


def test_requests_that_wait_end_where_no_engine_can_be_had(branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=1024))
    runtime.start()
    with monkeypatch.context() as patch:
        patch.setattr(StepLoopPool, "borrow", Mock(side_effect=MemoryError("no memory for buffers")))
        for handle in [runtime.submit(PROMPT, max_new_tokens=5) for _ in range(3)]:
            with pytest.raises(PlanError, match="no memory for buffers"):
                handle.result(60)
    assert len(runtime.submit(PROMPT, max_new_tokens=5, ignore_eos=True).result(60).token_ids) == 5
    assert runtime.close(timeout=60)
