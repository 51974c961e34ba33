"""What Ray's proxies call: the server's application, with the tokenizer, and without weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from outrider.plans.plan import open_plan
from outrider.runtime.exactness import foreign_kernels
from outrider.runtime.ray_serve.remote_runtime import RemoteRuntime
from outrider.runtime.ray_serve.replica import ReplicaInfo
from outrider.runtime.ray_serve.settings import Settings
from outrider.runtime.ray_serve.streams import sender
from outrider.runtime.request_queue import SchedulerConfig
from outrider.runtime.server.api_keys import read_api_keys, share_of_queue
from outrider.runtime.server.app import make_app
from outrider.runtime.server.config import ServerConfig
from outrider.runtime.server.observer import Tracer
from outrider.runtime.server.readiness import Phase, Readiness
from outrider.runtime.server.request_log import log_to_stderr
from outrider.runtime.server.served import drain

_LOG = logging.getLogger("outrider")
_EVERY = 2.0  # seconds between questions to replicas for their counts
_ANSWERS = 5.0  # seconds for replicas to answer


@serve.ingress()
class Ingress:
    """One of any number: each routes by what it has seen itself."""

    async def __init__(self, replicas: DeploymentHandle[Any], settings: Settings) -> None:  # type: ignore[misc]
        plan = await asyncio.to_thread(open_plan, settings.plan, verify=False)  # replicas verify it
        file = settings.api_key_file
        self._keys = tuple(dict.fromkeys([*settings.api_keys, *(() if file is None else read_api_keys(file))]))
        share = share_of_queue(settings.max_waiting, settings.max_waiting_per_key, len(self._keys))
        places = settings.places_here(plan.manifest.target.branches)
        config = SchedulerConfig(places, settings.max_waiting, mode=settings.mode, max_waiting_per_client=share)
        self._replicas = replicas
        self._settings = settings
        replica = serve.get_replica_context().replica_id
        self._name, caller = replica.unique_id, replica.to_full_id_str()  # the latter is the name of the actor
        self.served = RemoteRuntime(plan, sender(replicas), config, settings.failover, caller)
        self._readiness = Readiness()  # Ray asks for this application once replicas have loaded the plan
        self._tracing: Tracer | None = None
        if settings.telemetry:
            from outrider.runtime.server.tracing import tracing_by_environment  # of the extra `telemetry`

            self._tracing = tracing_by_environment()
        if settings.log_format is not None:
            log_to_stderr(settings.log_format)
        self._counting = asyncio.create_task(self._count())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray, once in each ingress."""
        settings = self._settings
        config = ServerConfig.from_options(
            settings,
            log_requests=settings.log_format is not None,
            model=settings.model_name or self.served.manifest.name,
            api_key=self._keys,
            tokens_per_minute=settings.tokens_per_minute_here,
            metric_labels={"ingress": self._name} if settings.ingresses > 1 else {},
        )
        return make_app(self.served, config, readiness=self._readiness, tracing=self._tracing)

    async def replicas(self) -> list[ReplicaInfo]:
        """The replicas that answer."""
        response = self._replicas.broadcast("about")
        try:
            found = await response.results_async(timeout_s=_ANSWERS, return_exceptions=True)
        except DeploymentUnavailableError:  # there is none now
            return []
        return [each for each in found if isinstance(each, ReplicaInfo)]

    async def drain(self, seconds: float) -> bool:
        """Take no more requests; cut off those that have not ended in `seconds`. Returns whether all ended."""
        self._readiness.reach(Phase.DRAINING)
        return await asyncio.to_thread(drain, self.served, seconds)

    async def _count(self) -> None:
        warned = False
        while True:
            await asyncio.sleep(_EVERY)
            try:
                found = await self.replicas()
            except (RayError, RayServeException, TimeoutError):  # some answer too late: nothing new is known
                continue
            except Exception:
                _LOG.exception("the counts of replicas cannot be had; they are asked again")
                continue
            self.served.counts.update({each.replica: each.stats for each in found})
            if not warned and (differences := _differences(found)):
                _LOG.warning(differences)
                warned = True
            self._readiness.reach(Phase.READY if found else Phase.NO_REPLICA)


def _differences(found: Sequence[ReplicaInfo]) -> str | None:
    """A sentence where the same seed may have other tokens at one replica than at another."""
    for each in found[1:]:
        if foreign := foreign_kernels(each.kernels, found[0].kernels):
            return (
                f"{each.host} has {foreign} as {found[0].host} has, so that tokens may depend on the replica of a "
                "request. Use nodes of one kind, or a plan with weights of int8 or int4."
            )
    return None
