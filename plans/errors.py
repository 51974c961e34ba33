"""Every error a user can cause. Each message says what was wrong, where, and what to do."""

from __future__ import annotations


class OutriderError(Exception):
    """Base of the errors that commands print as one sentence (exit status 2)."""


class UsageError(OutriderError):
    """A command line is wrong: the message names the option, and the command whose help explains it."""


class OutputError(OutriderError):
    """Standard output cannot be written (exit status 1)."""


class RecipeError(OutriderError):
    """The recipe is wrong: the message names the file, the line and the key."""


class CheckpointError(OutriderError):
    """A checkpoint is missing, incomplete or of an unsupported kind."""


class PlanError(OutriderError):
    """A plan cannot be built, read or trusted."""


class RequestError(OutriderError):
    """A call to the runtime carries a value that cannot be served."""


class BusyError(RequestError):
    """A session is asked for something while it generates."""


class EmbedError(OutriderError):
    """The C library cannot be built here."""
