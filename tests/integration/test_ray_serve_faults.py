"""Nodes that die, replicas that are stopped, ingresses that are killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from outrider import Runtime
from outrider.runtime.ray_serve.application import REPLICA, build
from outrider.runtime.ray_serve.settings import Settings
from tests.integration.ray_cluster import Deployed, deployed, processes, two_nodes
from tests.integration.served import client_of, wait_until

pytestmark = pytest.mark.long
OWN: dict[str, Any] = {"temperature": 0.8, "seed": 4}
EXTRA = {"ignore_eos": True, "drafter": "none"}
PROMPTS = [[5 + place, 9, 11] for place in range(8)]


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, str]]:
    with two_nodes(replica=1) as found:
        yield found


@pytest.fixture(scope="module")
def expected(branch_plan: Path) -> list[str]:
    """Texts of eight prompts with eight choices each."""
    runtime = Runtime.load(branch_plan, threads=1)
    own: dict[str, Any] = {"max_new_tokens": 150, "ignore_eos": True, **OWN}
    handles = [runtime.submit(prompt, **own, stream_id=place) for prompt in PROMPTS for place in range(8)]
    texts = [handle.result(timeout=120).text for handle in handles]
    assert runtime.close(timeout=60)
    return texts


def settings_of(plan: Path, **own: Any) -> Settings:
    """Replicas on a node each, and ingresses on the first."""
    placed = {"replica_cpus": 0.1, "replica_resources": {"replica": 1}, "ingress_resources": {"first": 0.1}}
    shared = {"plan": plan, "model_name": "toy", "replicas": 2, "cache_bytes": 2**24, "drain_seconds": 1.0}
    return Settings(**{**shared, **placed, **own})


@contextmanager
def asking(served: Deployed, clients: int, begun: int | None = None) -> Iterator[list[Future[list[str]]]]:
    """`clients` that stream 64 choices each; entered once `begun` of them (default: all) have a token."""
    beginnings = threading.Semaphore(0)

    def ask(client: openai.OpenAI) -> list[str]:
        texts = [""] * 64
        body: dict[str, Any] = {"model": "toy", "prompt": PROMPTS, "n": 8, "max_tokens": 150, "stream": True, **OWN}
        for number, piece in enumerate(client.completions.create(**body, extra_body=EXTRA)):
            for choice in piece.choices:
                texts[choice.index] += choice.text
            if number == 0:
                beginnings.release()
        return texts

    with client_of(served.address) as client, ThreadPoolExecutor(clients) as threads:
        asked = [threads.submit(ask, client) for _ in range(clients)]
        assert all(beginnings.acquire(timeout=60) for _ in range(begun or clients))
        yield asked


def test_a_node_dies(cluster: tuple[Cluster, str], branch_plan: Path, expected: list[str]) -> None:
    nodes, address = cluster
    with deployed(address, "node", settings_of(branch_plan)) as served:
        assert len({replica.node for replica in served.replicas()}) == 2
        with asking(served, 4) as asked:
            wait_until(lambda: all(replica.stats.running for replica in served.replicas()))
            (second,) = nodes.worker_nodes
            nodes.remove_node(second, allow_graceful=False)
            assert [each.result(timeout=180) for each in asked] == [expected] * 4
        assert len(served.replicas()) == 1
        nodes.add_node(num_cpus=4, object_store_memory=80 * 2**20, resources={"replica": 1})
        served.settle(2)


def test_a_replica_is_stopped(cluster: tuple[Cluster, str], branch_plan: Path, expected: list[str]) -> None:
    """Requests that run there after its time to drain continue at the other one."""
    settings = settings_of(branch_plan).model_dump(mode="json")

    def deploy(replicas: int) -> None:
        """As `serve deploy` of a config file does."""
        application = {"name": "fewer", "route_prefix": "/fewer", "import_path": f"{build.__module__}:build"}
        application |= {"args": settings, "deployments": [{"name": REPLICA, "num_replicas": replicas}]}
        config = ServeDeploySchema.model_validate({"applications": [application]})
        _get_global_client().deploy_apps(config, _blocking=True)

    deploy(2)
    served = Deployed(f"{cluster[1]}/fewer", serve.get_app_handle("fewer"))
    served.settle(2)
    before = {replica.pid for replica in served.replicas()}
    with asking(served, 6) as asked:
        deploy(1)
        assert [each.result(timeout=120) for each in asked] == [expected] * 6
    served.settle(1)
    assert served.replicas()[0].pid in before


def test_no_replica_is_left_to_continue(cluster: tuple[Cluster, str], branch_plan: Path) -> None:
    settings = settings_of(branch_plan, replicas=1, patience=0.5)
    with deployed(cluster[1], "alone", settings) as served:
        with asking(served, 1) as asked:
            os.kill(served.replicas()[0].pid, signal.SIGKILL)
            with pytest.raises(openai.APIError, match=r"No replica has taken the request in 0\.5 s"):
                asked[0].result(timeout=60)
        served.settle(1)


def test_an_ingress_that_dies_leaves_nothing_running(cluster: tuple[Cluster, str], branch_plan: Path) -> None:
    with deployed(cluster[1], "ingress", settings_of(branch_plan, max_ongoing=1000)) as served:
        with asking(served, 10, begun=1) as asked:
            (ingress,) = (process for process in processes() if "Ingress" in " ".join(process.cmdline()))
            ingress.send_signal(signal.SIGKILL)
            broken = [each.exception(timeout=60) for each in asked]
        assert any(broken)
        served.settle(2)
        stats = [replica.stats for replica in served.replicas()]
        assert sum(each.new_tokens for each in stats) < 10 * 64 * 150 / 2
        with client_of(served.address) as client:
            assert client.completions.create(model="toy", prompt="x", max_tokens=2).usage is not None
