"""Every error a user can cause. Each message says what was wrong, where, and what to do.

A wrong argument is a `ValueError` too, and a wrong moment a `RuntimeError`, as Python's own are. Code of ours that
catches a `ValueError` around a call that may raise one of these lets these pass first.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of the errors that commands print as one sentence (exit status 2)."""


class UsageError(OutriderError):
    """A command line is wrong: the message names the option, and the command whose help explains it."""


class OutputError(OutriderError):
    """Standard output cannot be written (exit status 1)."""


class RecipeError(OutriderError, ValueError):
    """The recipe is wrong: the message names the file, the line and the key."""


class CheckpointError(OutriderError, ValueError):
    """A checkpoint is missing, incomplete or of an unsupported kind."""


class PlanError(OutriderError):
    """A plan cannot be built, read or trusted."""


class OpError(PlanError):
    """An op of a pass refuses what it was given, such as logits that are not numbers."""


class RequestError(OutriderError, ValueError):
    """A call to the runtime carries a value that cannot be served."""


class BusyError(OutriderError, RuntimeError):
    """A call comes while it cannot be served: the session generates, the queue is full, or the runtime was closed."""


class ClosedError(BusyError):
    """A runtime that was closed is asked for something."""


class UnavailableError(OutriderError, RuntimeError):
    """No replica serves a request, or the one that served it is gone and no other can continue."""


class EmbedError(OutriderError):
    """The C library cannot be built here."""
