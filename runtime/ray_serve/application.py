"""The application that Ray Serve runs: replicas that hold the plan, and who takes requests in for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve

from outrider.plans.manifest import Geometry
from outrider.plans.plan import open_plan
from outrider.runtime.ray_serve.ingress import Ingress
from outrider.runtime.ray_serve.replica import Replica
from outrider.runtime.ray_serve.settings import Routing, Settings

REPLICA, INGRESS = "Replica", "Ingress"
_ROUTERS: dict[Routing, dict[str, Any]] = {
    "prefix": {"request_router_class": "outrider.runtime.ray_serve.router:PrefixRouter"},
    "balanced": {},  # Ray's own
    "round-robin": {"request_router_class": "outrider.runtime.ray_serve.router:RoundRobinRouter"},
}
_REPORTING = 2.0  # seconds between reports of a replica to all ingresses of what it holds
_ANSWERING = 10.0  # seconds to answer a health check; after three that are missed, a replica is replaced
_CARE: dict[str, Any] = {
    "graceful_shutdown_wait_loop_s": 0.2,
    "health_check_period_s": 5.0,
    "health_check_timeout_s": _ANSWERING,
}
_MARGIN = 15.0  # seconds that an ingress has after its time to drain, to cut off who is left and send the last spans


def build(args: Settings | dict[str, Any]) -> serve.Application:
    """An application of settings: `import_path: outrider.runtime.ray_serve.application:build` of a Serve config file.

    The plan that is in the folder now is the one that is served. Raises PlanError, and pydantic's ValidationError.
    """
    settings = Settings.model_validate(args)
    manifest = open_plan(settings.plan, verify=False).manifest
    replica = serve.deployment(
        name=REPLICA,
        graceful_shutdown_timeout_s=settings.drain_seconds,  # who then still runs continues at another one
        **_scaling(settings, manifest.target),
        **_CARE,
    )(Replica)
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=settings.ingresses,
        max_ongoing_requests=100_000,  # what waits is bounded by `max_waiting`
        ray_actor_options={
            "num_cpus": settings.ingress_cpus,
            "resources": settings.ingress_resources,
            "runtime_env": {"env_vars": _of_telemetry(os.environ) if settings.telemetry else {}},
        },
        graceful_shutdown_timeout_s=settings.drain_seconds + _MARGIN,
        **_CARE,
    )(Ingress)
    return ingress.bind(replica.bind(settings, manifest.identity), settings)


def _of_telemetry(environment: Mapping[str, str]) -> dict[str, str]:
    """OpenTelemetry's variables, for ingresses on other machines; but for headers: they hold keys, Ray shows all."""
    own = {name: value for name, value in environment.items() if name.startswith("OTEL_")}
    return {name: value for name, value in own.items() if not name.endswith("_HEADERS")}


def _scaling(settings: Settings, target: Geometry) -> dict[str, Any]:
    """How many replicas there are, and how many requests each has at once: as many running, and as many waiting."""
    at_once = settings.max_running or target.branches
    options: dict[str, Any] = {
        "max_ongoing_requests": settings.max_ongoing or 2 * at_once,
        "ray_actor_options": {
            "num_cpus": settings.cpus_of_replica,
            "num_gpus": settings.replica_gpus,
            "resources": settings.replica_resources,
        },
        "request_router_config": {**_ROUTERS[settings.routing], "request_routing_stats_period_s": _REPORTING},
    }
    if settings.least_replicas == settings.most_replicas:
        return {"num_replicas": settings.replicas, **options}
    options["autoscaling_config"] = {
        "min_replicas": settings.least_replicas,
        "initial_replicas": settings.replicas,
        "max_replicas": settings.most_replicas,
        "target_ongoing_requests": settings.target_ongoing or at_once,
    }
    return options
