"""A Ray cluster of two nodes on this machine, applications on it, and that nothing of either is left."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve._private import api
from ray.serve.handle import DeploymentHandle

from outrider.runtime.ray_serve.application import build
from outrider.runtime.ray_serve.replica import ReplicaInfo
from outrider.runtime.ray_serve.settings import Settings
from tests.integration.served import wait_until

_NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # by default 5, within which a busy machine imports nothing
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def cluster_of_two(cpus: int = 4, **resources: float) -> Iterator[Cluster]:
    """A cluster of which no process is left. Both nodes have `resources`, and the first one "first"."""
    os.environ.update(_ENVIRONMENT)
    os.makedirs("/tmp/ray", exist_ok=True)  # where Ray notes the address of what began last
    before = processes()
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets lie in it
    node = {**_NODE, "num_cpus": cpus}
    head = {"include_dashboard": False, "temp_dir": folder, "resources": {"first": 1, **resources}, **node}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(resources=resources, **node)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        left = psutil.wait_procs(processes() - before, timeout=120)[1]
        assert left == [], "the cluster left processes"


@contextmanager
def two_nodes(**resources: float) -> Iterator[tuple[Cluster, str]]:
    """A cluster that this process drives, with Ray Serve, and the address where that listens."""
    with cluster_of_two(**resources) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        port = free_port()
        api.HTTP_PROXY_TIMEOUT = 300  # by default 60 seconds, within which a busy machine starts no proxy
        serve.start("HeadOnly", {"host": "127.0.0.1", "port": port})
        yield cluster, f"http://127.0.0.1:{port}"
        serve.shutdown()


def processes() -> set[psutil.Process]:
    """All that this process has started, directly or not."""
    return set(psutil.Process().children(recursive=True))


class Deployed:
    """An application on the cluster."""

    def __init__(self, address: str, ingress: DeploymentHandle[Any]) -> None:
        self.address, self.ingress = address, ingress

    def replicas(self) -> list[ReplicaInfo]:
        until = time.monotonic() + 120
        while True:  # a busy machine's replicas may not answer in Ray's own time
            with suppress(TimeoutError):
                found: list[ReplicaInfo] = self.ingress.replicas.remote().result(timeout_s=60)
                return found
            assert time.monotonic() < until

    def running(self) -> int:
        """Requests at replicas, whether they wait there or run."""
        return sum(each.stats.running + each.stats.waiting for each in self.replicas())

    def settle(self, replicas: int) -> None:
        """Wait until there are that many `replicas`, with nothing to do."""
        wait_until(lambda: len(self.replicas()) == replicas and not self.running())


@contextmanager
def deployed(address: str, name: str, settings: Settings) -> Iterator[Deployed]:
    """The application of `settings` under `/name`, for a while."""
    ingress = serve.run(build(settings), name=name, route_prefix=f"/{name}")
    yield Deployed(f"{address}/{name}", ingress)
    serve.delete(name)
