"""The tokens of all branches on the device: a step may be laid out before the host has seen the
tokens that it feeds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

from outrider.plans import names
from outrider.runtime.backends.device_contract import Device

_THREADS = 128
_NEW, _PICKED = names.SYMBOLS.index(names.NEW), names.SYMBOLS.index(names.LOGITS)
_TAKE = (names.POSITIONS, names.BRANCH, names.TOKEN_IDS)
_KEEP = (names.COMMITTED, names.LOGIT_INDICES, names.POSITIONS, names.BRANCH)


class TokenPool:
    """int64 `[branches + 1, length]`, the token of each position of a branch; what is no branch's shares the last row.

    `addresses` are those of the target's step, by tensor. It holds what rounds without drafts have committed: the host
    gives all other tokens itself.
    """

    def __init__(
        self, device: Device, allocate: Callable[[int], int], addresses: Mapping[str, int], branches: int, length: int
    ) -> None:
        self._device = device
        pool = allocate(8 * (branches + 1) * length)
        self._shape = [ctypes.c_int64(branches + 1), ctypes.c_int64(length)]
        self._take, self._keep = (
            [ctypes.c_uint64(address) for address in (pool, *(addresses[name] for name in tensors))]
            for tensors in (_TAKE, _KEEP)
        )

    def take(self, sizes: list[int]) -> None:
        """Enqueue: tokens of the step that the host has not seen are put in their places."""
        self._launch("outrider_take_tokens", self._take, sizes[_NEW])

    def keep(self, sizes: list[int]) -> None:
        """Enqueue: what the step has committed is kept."""
        self._launch("outrider_keep_tokens", self._keep, sizes[_PICKED])

    def _launch(self, kernel: str, pointers: list[ctypes.c_uint64], count: int) -> None:
        if count:
            self._device.launch(kernel, 1, _THREADS, [*pointers, ctypes.c_int64(count), *self._shape])
