"""The buffers of one session. This object owns the addresses: each buffer is allocated once, at its largest size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.check import buffer_shape, session_bytes
from outrider.plans.errors import PlanError
from outrider.plans.manifest import BackendPlan
from outrider.plugins import native
from outrider.runtime.kv.memory import HostKv, KvMemory, zeros
from outrider.runtime.sampling import SamplingParams

Call = Callable[[], None]


class Exchange(Protocol):
    """How a program's stages and the host exchange data on a device. Calls only enqueue work, but for those that say
    that they wait."""

    records: bool
    """Whether the device can record, so that many calls become one launch."""

    records_engines: bool
    """Whether engines may stand in a stretch with ops, or are called singly."""

    def recording(self) -> AbstractContextManager[None]:
        """Record the runs inside the block: later runs of the same sizes are one launch each."""

    def prepare(self) -> None:
        """Before the device is given a program: note for `upload` what the host has changed of slot tables."""

    def upload(self) -> None:
        """Copy what the host has written to the device."""

    def download(self) -> None:
        """Copy back what stages have written."""

    def take_tokens(self, sizes: list[int]) -> None:
        """Put tokens that the host has not seen in their places in the target's step, of these sizes."""

    def keep_tokens(self, sizes: list[int]) -> None:
        """Keep the tokens that the target's step has committed for the step after it."""

    def land(self) -> int:
        """Copy back what stages have written to a landing of its own; return its number. There are two, in turn: what
        the last but one holds is lost."""

    def landings(self, buffer: str) -> Sequence[NDArray[Any]]:
        """Return what is seen of a buffer, by landing."""

    def collect(self, landing: int) -> None:
        """Wait until a landing is filled. Raises as `wait` does."""

    def sent(self) -> None:
        """Note that the last upload is enqueued."""

    def taken(self) -> None:
        """Wait until the last upload is over, so that the host may write what it reads."""

    def wait_for_launches(self) -> None:
        """Wait for every launch and upload: nothing reads or writes the buffers then."""

    def settle(self) -> None:
        """Wait for what is enqueued of a program that has failed, so that the host may write what it reads. The next
        upload brings all slot tables: this program's may not have come."""

    def wait(self) -> None:
        """Wait for all enqueued work. Raises `PlanError` where an op found that no token can be chosen."""

    def stretch(self, calls: Sequence[Call], sizes: Sequence[Sequence[int]]) -> Call:
        """Return one call for several consecutive ones that run with the present values of `sizes`."""

    def singly(self, call: Call) -> Call:
        """Return a call that enqueues, and is never recorded with others."""


class Buffers:
    """Arrays by name, views included, and the ops on them. Zero-initialised: what no step has written is finite.

    Here stages work on the host's own arrays. Where they work on a device (`runtime.backends.device`), the arrays are
    what the host sees of its memory: by `exchange` they are there before a program's stages, and back after them, all
    but the large ones, which are asked for (`rows`) and sent (`send`) singly.
    """

    exchange: Exchange | None = None
    scratch_bytes = 0
    """Of memory on a device beside the buffers: what engines and ops leave there between two launches."""

    def __init__(self, plan: BackendPlan, *, huge_pages: bool = True) -> None:
        try:
            self.arrays: dict[str, NDArray[Any]] = {
                buffer.name: zeros(buffer_shape(plan, buffer), buffer.dtype.numpy, huge_pages=huge_pages)
                for buffer in plan.buffers
            }
        except MemoryError:
            raise PlanError(
                f"a session of this plan needs {session_bytes(plan) / 1e9:.1f} GB for its buffers, more than this "
                "machine gives; build the plan with a smaller capacity.context"
            ) from None
        for name, view in plan.views.items():
            self.arrays[name] = self.arrays[view.buffer][view.plane]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def array(self, model: str, tensor: str) -> NDArray[Any]:
        """Return the buffer that holds `tensor` for `model`, as the host sees it."""
        return self.arrays[names.buffer_name(model, tensor)]

    def op(self, name: str, bound: Mapping[str, str], attributes: Mapping[str, int | float]) -> native.BoundOp:
        """Return op `name` on the buffers that `bound` names for its tensors. Raises what `native.create` does."""
        return native.create(name, {parameter: self.arrays[buffer] for parameter, buffer in bound.items()}, attributes)

    def rows(self, model: str, tensor: str, start: int, stop: int) -> NDArray[Any]:
        """Return rows `[start, stop)` of a large buffer's first dimension: a view, valid until the next step."""
        return self.array(model, tensor)[start:stop]

    def send(self, model: str, tensor: str, elements: int) -> None:
        """Note that the host has written the first `elements` of a large buffer."""

    def send_rows(self, model: str, tensor: str, start: int, stop: int) -> None:
        """Note that the host has changed rows `[start, stop)` of a large buffer, which it had asked for by `rows`."""

    def copy_rows(self, source: tuple[str, str, int], to: tuple[str, str, int], count: int = 1) -> None:
        """Copy rows of a large buffer, from `(model, tensor, index)` on, to others, which they do not overlap."""
        self.array(*to[:2])[to[2] : to[2] + count] = self.array(*source[:2])[source[2] : source[2] + count]

    def kv(self, model: str) -> Sequence[KvMemory]:
        """Return the rows of a model's KV cache."""
        kv = self.array(model, names.KV)
        return [HostKv(kv[:, row]) for row in range(kv.shape[1])]

    def taken(self) -> None:
        """Wait until the device has taken the step of the last launch, so that the host may lay out another."""
        if self.exchange is not None:
            self.exchange.taken()

    def changed(self, model: str, row: int, start: int, stop: int) -> None:
        """Note that the host has changed slots `[start, stop)` of a row of a model's slot tables."""

    def set_sampling(self, branch: int, params: SamplingParams) -> None:
        """Fill a branch's sampling slot."""
        for name, value in params.slots().items():
            self.arrays[name][branch] = value
