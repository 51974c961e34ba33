"""Rules over logits: what a request changes about the target's logits before a token is chosen.

A rule is a function of the path, the tokens generated so far: committed ones, tentative ones (of partial KV), and those
of the walk down a draft tree.
So a request has the same tokens with any drafter as without one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans.errors import RequestError
from outrider.runtime.text.grammars import Grammars


@dataclass(frozen=True)
class RuleContext:
    """What a request asks of its rules: the checked values of all options, its end tokens, and the plan's grammars."""

    values: Mapping[str, Any]
    ends: Collection[int]
    grammars: Grammars


class LogitsRule(ABC):
    """A change of the target's logits, by the tokens generated so far. One rule may serve any number of requests."""

    name = "A rule of the request"

    def begin(self, prompt: Sequence[int]) -> LogitsRule:
        """Return the rule for one generation after `prompt`: the rule itself, unless it depends on the prompt or keeps
        something from call to call."""
        return self

    @abstractmethod
    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        """Change `logits`, f32 `[vocab]`, in place: the token after `path` is chosen from them.

        `path` are the tokens generated so far, each of which was allowed; it is not to be changed. The next call may be
        for a path that continues from any earlier one. Raises RequestError where no token may follow, which ends the
        generation once all of the path is committed.
        """

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        """Return at most `limit` tokens that follow `path` with any choice of the target, as far as is easily known.

        They are drafted in place of the drafter's tokens.
        """
        return ()


@contextmanager
def failing_alone(name: str) -> Iterator[None]:
    """Turn what a function of a request's raises into a RequestError, which ends that request alone.

    Anything that it raises: exits and panics would end the thread of all. In the main thread, an interrupt or an exit
    is the program's own, and stays one.
    """
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        ends = isinstance(error, KeyboardInterrupt | SystemExit)
        if ends and threading.current_thread() is threading.main_thread():
            raise
        raise RequestError(f"{name} failed: {type(error).__name__}: {error}") from error
