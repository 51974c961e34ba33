"""What an application is made of: the same from the command line and from a Serve config file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from outrider.plans.errors import RequestError
from outrider.runtime.branch_request import Mode
from outrider.runtime.exactness import Exactness
from outrider.runtime.prefix_cache.cache import PrefixCacheConfig
from outrider.runtime.ray_serve.following import Failover
from outrider.runtime.request_queue import SchedulerConfig
from outrider.runtime.server.api_keys import check_shares
from outrider.runtime.server.config import LogFormat, ServerConfig

Routing = Literal["prefix", "balanced", "round-robin"]


class Settings(BaseModel):
    """`args` of a Serve config file; the command's options have the same names.

    `plan` is a path that leads to the same plan on every node. `replicas` are those at the start; with `max_replicas`
    there are more while more than `target_ongoing` requests are under way on each, and down to `min_replicas` while
    fewer are. Counts that are None follow from the plan's branches. `replica_cpus` (default: `threads`), `_gpus` and
    `_resources` are what Ray sets aside for each, and so say on which machines they are. Of `tokens_per_minute` each
    ingress has an equal share. With `log_format` and `telemetry`, ingresses log and trace requests. Ray logs `args`:
    keep keys in an `api_key_file`, which every ingress reads.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    plan: Path
    backend: str | None = None
    threads: int = Field(default=1, ge=0)
    cuda_graphs: bool = True
    exactness: Exactness = "probed"
    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    replicas: PositiveInt = 1
    min_replicas: PositiveInt | None = None
    max_replicas: PositiveInt | None = None
    ingresses: PositiveInt = 1
    target_ongoing: PositiveInt | None = None
    max_ongoing: PositiveInt | None = None
    replica_cpus: float | None = Field(default=None, ge=0)
    replica_gpus: float = Field(default=0.0, ge=0)
    replica_resources: dict[str, float] = {}
    ingress_cpus: float = Field(default=0.0, ge=0)
    ingress_resources: dict[str, float] = {}
    routing: Routing = "prefix"
    max_running: PositiveInt | None = None
    max_waiting: PositiveInt = SchedulerConfig.max_waiting
    max_waiting_per_key: PositiveInt | None = None
    max_choices: PositiveInt = ServerConfig.max_choices
    prefill_tokens: PositiveInt | None = None
    mode: Mode | None = None
    prefix_cache: bool = True
    cache_tokens: PositiveInt = PrefixCacheConfig.max_cached_tokens
    cache_bytes: PositiveInt = PrefixCacheConfig.memory_bytes
    max_body_bytes: PositiveInt = ServerConfig.max_body_bytes
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    protect_metrics: bool = False
    share_prefixes: bool = False
    tokens_per_minute: PositiveInt | None = None
    log_format: LogFormat | None = None
    telemetry: bool = False
    drain_seconds: float = Field(default=ServerConfig.drain_seconds, ge=0)
    losses: int = Field(default=Failover.losses, ge=0)
    patience: float = Field(default=Failover.patience, gt=0)

    def model_post_init(self, _: object) -> None:
        check_replicas(self)
        check_shares(self, bool(self.api_keys or self.api_key_file), "api_key_file")

    @property
    def least_replicas(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.least_replicas) if self.max_replicas is None else self.max_replicas

    @property
    def cpus_of_replica(self) -> float:
        return float(self.threads) if self.replica_cpus is None else self.replica_cpus

    @property
    def cpus(self) -> float:
        """Of all replicas and ingresses there may be."""
        return self.most_replicas * self.cpus_of_replica + self.ingresses * self.ingress_cpus

    def places_here(self, branches: int) -> int:
        """This ingress's share of the requests that all replicas, of a plan of `branches`, run at once."""
        return max(1, self.least_replicas * (self.max_running or branches) // self.ingresses)

    @property
    def tokens_per_minute_here(self) -> int | None:
        """The budget that one ingress has of each API key's: all of them together give no more."""
        return None if self.tokens_per_minute is None else max(1, self.tokens_per_minute // self.ingresses)

    @property
    def cache_config(self) -> PrefixCacheConfig | None:
        """The prefix cache of each replica."""
        if not self.prefix_cache:
            return None
        return PrefixCacheConfig(max_cached_tokens=self.cache_tokens, memory_bytes=self.cache_bytes)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """How each replica serves; requests wait in front of replicas, so that it refuses none."""
        return SchedulerConfig(self.max_running, max(2**20, self.max_waiting), self.prefill_tokens, self.mode)

    @property
    def failover(self) -> Failover:
        return Failover(self.losses, self.patience)


def check_replicas(settings: object, spelled: Callable[[str], str] = str) -> None:
    """Raise RequestError unless `min_replicas`, `replicas` and `max_replicas`, where they are given, are in order.

    `spelled` spells these names for the user.
    """
    named = [(spelled(name), getattr(settings, name)) for name in ("min_replicas", "replicas", "max_replicas")]
    for (low, least), (high, most) in pairwise((name, number) for name, number in named if number is not None):
        if least > most:
            raise RequestError(f"{low} is {least}, above {high} {most}; lower one or raise the other.")
