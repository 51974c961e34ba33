"""Ray's side of a request: sent to a replica, and what Ray's errors mean to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from outrider.plans.errors import OutriderError
from outrider.runtime.ray_serve.following import LostError, Message, ReplicaRequest, Send


def sender(replicas: DeploymentHandle[Any]) -> Send:
    """Send requests to the replicas of a deployment, as its router chooses."""
    generate = replicas.options(stream=True).generate

    def send(sent: ReplicaRequest) -> RayStream:
        return RayStream(cast("DeploymentResponseGenerator[Message]", generate.remote(sent)))

    return send


class RayStream:
    """A `following.ReplicaStream`."""

    def __init__(self, response: DeploymentResponseGenerator[Message]) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[Message]:
        try:
            async for message in self._response:
                yield message
        except RayTaskError as error:
            if isinstance(error.cause, OutriderError):
                raise error.cause from None
            raise LostError(f"it failed: {error.cause!r}") from error
        except (RayError, RayServeException) as error:
            raise LostError(str(error).partition("\n")[0]) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise LostError("its part of the request was cancelled") from None  # as where a replica ends

    def cancel(self) -> None:
        self._response.cancel()
