"""Requests for one sequence or for several branches, checked before any of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import numpy as np

from outrider.plans.errors import RequestError
from outrider.plans.manifest import Geometry, Manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.generation import Generation
from outrider.runtime.numbers import shown
from outrider.runtime.options.options import OPTIONS, Options
from outrider.runtime.options.request import Request, resolve
from outrider.runtime.sampling import new_seed
from outrider.runtime.text.grammars import Grammars
from outrider.runtime.text.prompt import prepare_prompt

Mode = Literal["in-one-sequence", "batching"]
MODES: tuple[Mode, ...] = get_args(Mode)

BranchPrompt = str | Sequence[int] | Mapping[str, Any]
"""The beginning of a branch: text, token ids, or a mapping of `prompt`, `predicted_tokens` and `Options` of its own.

In a mapping, the prompt may be a `LatePrompt`.
"""

LatePrompt = Callable[[Mapping[int, Generation], float], str | Sequence[int] | None]
"""The beginning of a branch that is not known yet: a function of the generations that have ended, by branch, and of the
seconds that it may wait. It is called between passes until it returns the beginning; None asks for another call.
"""

MOST_SAMPLES = 1024
_NO_OPTIONS = ("prompt", "predicted_tokens")


def check_alone(
    prompt: str | Sequence[int], options: Options, manifest: Manifest, grammars: Grammars, tokenizer: Tokenizer
) -> Request:
    """Check a request for a sequence of its own. Raises RequestError."""
    request = resolve(options, manifest, grammars)
    given, least = request.generated, request.min_tokens
    prepared = prepare_prompt(prompt, (), request.stop, tokenizer, manifest.target, generated=given, min_tokens=least)
    return replace(request, token_ids=prepared.ids)


def check_branches(
    manifest: Manifest,
    grammars: Grammars,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    branches: Sequence[BranchPrompt] | None,
    n: int | None,
    mode: Mode,
    options: Options,
) -> tuple[list[int], list[Request]]:
    """Check a call; return the shared prefix and the branches after it. Raises RequestError naming the branch."""
    geometry = manifest.target
    if geometry.branches < 2:
        raise RequestError("The plan serves one branch; build it with capacity.branches of 2 to 128 for more.")
    if mode not in MODES:
        raise RequestError(f"mode is {shown(mode)}; choose one of {', '.join(MODES)}.")
    if mode == "batching" and geometry.rows < 2:
        raise RequestError("The plan has one row for all branches; build it with capacity.batching for mode batching.")
    if (branches is None) == (n is None):
        raise RequestError("Pass either `branches`, or `n` for samples of the prompt itself.")
    prefix = prepare_prompt(prompt, (), (), tokenizer, geometry).ids
    given: list[Mapping[str, Any]]
    if branches is None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_SAMPLES:
            raise RequestError(f"n is {shown(n)}; pass a whole number from 1 to {MOST_SAMPLES}.")
        prefix, last = prefix[:-1], prefix[-1:]
        given = [{"prompt": last}] * n
    elif isinstance(branches, str) or not isinstance(branches, Sequence | np.ndarray):
        raise RequestError(
            f"`branches` is of type {type(branches).__name__}; pass a list, of a text or token ids a branch."
        )
    else:
        given = [branch if isinstance(branch, Mapping) else {"prompt": branch} for branch in branches]
        if not given:
            raise RequestError("`branches` is empty; there is nothing to continue.")
    options = cast(Options, {**options, "seed": new_seed() if options.get("seed") is None else options["seed"]})
    asked = []
    for place, branch in enumerate(given):
        try:
            own = {n: value for n, value in branch.items() if n not in _NO_OPTIONS and value is not None}
            merged = cast(Options, {**options, **own})
            request = resolve(merged, manifest, grammars)
            if request.generated:
                raise RequestError("generated is of a request that continues alone; leave it out.")
            if "stream_id" not in own:
                stream = OPTIONS["stream_id"].kind.check(request.sampling.stream_id + place, "stream_id")
                request = replace(request, sampling=replace(request.sampling, stream_id=stream))
            predicted = branch.get("predicted_tokens", request.max_new_tokens)
            if isinstance(predicted, bool) or not isinstance(predicted, int) or predicted < 1:
                raise RequestError(f"predicted_tokens is {shown(predicted)}; pass a whole number of at least 1.")
            beginning = branch.get("prompt", "")
            if callable(beginning):
                late = _later(beginning, place, prefix, tokenizer, geometry)
                asked.append(replace(request, late=late, predicted_tokens=predicted))
                continue
            ids = _begin(beginning, prefix, tokenizer, geometry)
        except RequestError as error:
            raise RequestError(f"Branch {place}: {error}") from None
        asked.append(replace(request, token_ids=ids, predicted_tokens=predicted))
    if len({each.cache_salt for each in asked}) > 1:
        raise RequestError("Branches have several cache_salts, and share the prompt; pass one for all of them.")
    return prefix, asked


def _begin(beginning: str | Sequence[int], prefix: list[int], tokenizer: Tokenizer, geometry: Geometry) -> list[int]:
    ids = prepare_prompt(beginning, prefix, (), tokenizer, geometry).ids
    if not ids:
        raise RequestError("It begins with nothing; pass text or token ids, or ask for `n` samples.")
    return ids


def _later(
    prompt: LatePrompt, place: int, prefix: list[int], tokenizer: Tokenizer, geometry: Geometry
) -> Callable[[Mapping[int, Generation], float], list[int] | None]:
    """The token ids of a late prompt, checked once they are known."""

    def late(ended: Mapping[int, Generation], seconds: float) -> list[int] | None:
        beginning = prompt(ended, seconds)
        try:
            return None if beginning is None else _begin(beginning, prefix, tokenizer, geometry)
        except RequestError as error:
            raise RequestError(f"Branch {place}: {error}") from None

    return late
