"""`python -m outrider.runtime.ray_serve` and the Serve config file that is shipped: from start to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve.schema import ServeDeploySchema

from outrider import Runtime
from outrider.plans.plan import open_plan
from outrider.runtime.ray_cluster import _sigterm_blocked
from outrider.runtime.ray_serve.application import _scaling, build
from outrider.runtime.ray_serve.command import main
from outrider.runtime.ray_serve.settings import Settings
from tests.integration.ray_cluster import free_port
from tests.integration.served import client_of, get, wait_until

CONFIG = Path(__file__).resolve().parents[2] / "runtime" / "ray_serve" / "serve.yaml"


@contextmanager
def started(command: list[str], address: str, seconds: float = 120) -> Iterator[subprocess.Popen[str]]:
    """A command that serves, until it has ended; it must not leave a process."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    known: list[psutil.Process] = []
    try:
        until = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                if get(f"{address}/v1/models")[0] == 200:
                    break
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.2)
        known = psutil.Process(process.pid).children(recursive=True)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)
        left = psutil.wait_procs(known, timeout=60)[1]
        assert left == [], "the command left processes"


def test_sigterm_while_ray_begins_ends_the_command_without_rays_own_handler() -> None:
    before, heard = signal.getsignal(signal.SIGTERM), list[int]()

    def begin() -> None:
        with _sigterm_blocked():
            signal.signal(signal.SIGTERM, lambda *_: heard.append(1))  # as `ray.init` does
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    try:
        with pytest.raises(SystemExit) as ended:
            begin()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert heard == []


@pytest.mark.long
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["itself", "all its processes"])
def test_the_command_serves_until_sigterm(branch_plan: Path, kill: Callable[[int, int], None]) -> None:
    """And finishes the requests that run. A service manager sends SIGTERM to all of its processes."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "outrider.runtime.ray_serve", str(branch_plan), "--port", str(port)]
    command += ["--replicas", "2", "--cache-bytes", str(2**24), "--drain-seconds", "20", "--replica-cpus", "0.5"]
    own: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    expected = Runtime.load(branch_plan, threads=1).generate("x = ", max_new_tokens=100, ignore_eos=True, **own)
    with started(command, address) as process, client_of(address) as client:
        own |= {"model": "toy", "extra_body": {"ignore_eos": True, "drafter": "none"}}
        found = client.completions.create(prompt="x = ", max_tokens=100, **own)
        assert found.choices[0].text == expected.text
        prompts = [[5 + place] for place in range(8)]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.completions.create, prompt=prompts, n=8, max_tokens=150, **own)
            # Those of the warm-up of two replicas are among them.
            wait_until(lambda: "outrider_requests_submitted_total 67.0" in get(f"{address}/metrics")[1])
            kill(process.pid, signal.SIGTERM)
            assert len(asked.result(60).choices) == 64
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert f"serving 'toy' by 2 replicas at {address}\n" in said
    assert "Traceback" not in said


def test_wrong_options_are_refused_first(branch_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options, words in (
            (["--port", str(port)], f"listens at port {port} of 127.0.0.1 already"),
            (["--replicas", "3", "--max-replicas", "2"], "--replicas is 3, above --max-replicas 2; lower one or"),
            (["--min-replicas", "2", "--max-replicas", "1"], "--min-replicas is 2, above --max-replicas 1; lower"),
            (["--max-waiting-per-key", "3"], "--max-waiting-per-key shares the queue among API keys; pass --api-key"),
            (["--ray", "127.0.0.1:1"], "where no Ray cluster can be reached"),
        ):
            assert main([str(branch_plan), *options]) == 2
            assert words in " ".join(capsys.readouterr().err.split())
    assert main([str(branch_plan.parent / "nowhere")]) == 2


def test_replicas_are_added_up_to_the_most_by_the_requests_under_way(branch_plan: Path) -> None:
    settings = Settings(plan=branch_plan, min_replicas=1, replicas=2, max_replicas=3, target_ongoing=5)
    assert _scaling(settings, open_plan(branch_plan).manifest.target)["autoscaling_config"] == {
        "min_replicas": 1, "initial_replicas": 2, "max_replicas": 3, "target_ongoing_requests": 5,
    }  # fmt: skip


def test_the_config_that_is_shipped_is_one_of_ours(branch_plan: Path) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(CONFIG.read_text(encoding="utf-8")))
    (application,) = config.applications
    assert application.import_path == f"{build.__module__}:build"
    assert isinstance(build({**application.args, "plan": str(branch_plan)}), serve.Application)
    assert Settings(**application.args).most_replicas == 4
    for wrong, said in (
        ({"no_such_key": 1}, "no_such_key"),
        ({"replicas": 5}, "replicas is 5, above max_replicas 4"),
        ({"max_waiting_per_key": 9}, "max_waiting_per_key shares the queue among API keys; pass api_key_file too"),
    ):
        with pytest.raises(ValidationError, match=said):
            Settings(**{**application.args, "api_key_file": None, **wrong})
