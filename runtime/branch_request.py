"""Requests for one sequence or for several branches, checked before any of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from outrider.runtime.text.prompt import Messages, TemplateVariables, choose_prompt, prepare_prompt

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


@dataclass(frozen=True)
class BranchRequest:
    """A checked call: the `branches` after `prefix`, of which at most `parallel` live at once. The prefix's KV is kept
    for drafters of the branches, and for those of `keep_for`."""

    prefix: list[int]
    branches: list[Request]
    mode: Mode
    parallel: int
    keep_for: Sequence[str]


@dataclass(frozen=True)
class RequestChecks:
    """Checks requests against a plan. All raise RequestError."""

    manifest: Manifest
    grammars: Grammars
    tokenizer: Tokenizer

    def prompt(
        self, prompt: str | Sequence[int] | None, messages: Messages | None, variables: TemplateVariables | None
    ) -> str | Sequence[int]:
        """The prompt, or that of `messages`; see `choose_prompt`."""
        return choose_prompt(prompt, messages, self.tokenizer, self.manifest.target, variables)

    def alone(self, prompt: str | Sequence[int], options: Options) -> Request:
        """A request for a sequence of its own."""
        request = resolve(options, self.manifest, self.grammars)
        given, least = request.generated, request.min_tokens
        prepared = prepare_prompt(
            prompt, (), request.stop, self.tokenizer, self.manifest.target, generated=given, min_tokens=least
        )
        return replace(request, token_ids=prepared.ids)

    def branches(
        self,
        prompt: str | Sequence[int],
        branches: Sequence[BranchPrompt] | None,
        n: int | None,
        max_parallel: int | None,
        mode: Mode,
        keep_for: Sequence[str],
        options: Options,
    ) -> BranchRequest:
        """The arguments of `Runtime.stream_branches`. An error of a branch names the branch."""
        target = self.manifest.target
        _check_mode(mode, target)
        if (branches is None) == (n is None):
            raise RequestError("Pass either `branches`, or `n` for samples of the prompt itself.")
        prefix = prepare_prompt(prompt, (), (), self.tokenizer, target).ids
        if branches is None:
            if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_SAMPLES:
                raise RequestError(f"n is {shown(n)}; pass a whole number from 1 to {MOST_SAMPLES}.")
            prefix, last = prefix[:-1], prefix[-1:]
            given: list[Mapping[str, Any]] = [{"prompt": last}] * n
        else:
            given = _mappings(branches)
        options = cast(Options, {**options, "seed": new_seed() if options.get("seed") is None else options["seed"]})
        asked = []
        for place, branch in enumerate(given):
            try:
                asked.append(self._branch(place, branch, prefix, options))
            except RequestError as error:
                raise RequestError(f"Branch {place}: {error}") from None
        if len({each.cache_salt for each in asked}) > 1:
            raise RequestError("Branches have several cache_salts, and share the prompt; pass one for all of them.")
        parallel = target.branches if max_parallel is None else max_parallel
        if isinstance(parallel, bool) or not isinstance(parallel, int) or not 1 <= parallel <= target.branches:
            raise RequestError(f"max_parallel is {max_parallel!r}; pass a whole number from 1 to {target.branches}.")
        drafters = ["none", *(drafter.name for drafter in self.manifest.drafters)]
        if wrong := [name for name in keep_for if name not in drafters]:
            raise RequestError(f"keep_for names {wrong[0]!r}; the plan has the drafters {', '.join(drafters)}.")
        return BranchRequest(prefix, asked, mode, parallel, keep_for)

    def _branch(self, place: int, branch: Mapping[str, Any], prefix: list[int], options: Options) -> Request:
        own = {name: value for name, value in branch.items() if name not in _NO_OPTIONS and value is not None}
        merged = cast(Options, {**options, **own})
        request = resolve(merged, self.manifest, self.grammars)
        if request.generated:
            raise RequestError("generated is of a request that continues alone; leave it out.")
        if "stream_id" not in own:
            stream = OPTIONS["stream_id"].kind.check(request.sampling.stream_id + place, "stream_id")
            request = replace(request, sampling=replace(request.sampling, stream_id=stream))
        predicted = branch.get("predicted_tokens", request.max_new_tokens)
        if isinstance(predicted, bool) or not isinstance(predicted, int) or predicted < 1:
            raise RequestError(f"predicted_tokens is {shown(predicted)}; pass a whole number of at least 1.")
        request, beginning = replace(request, predicted_tokens=predicted), branch.get("prompt", "")
        if callable(beginning):
            return replace(request, late=self._later(beginning, place, prefix))
        return replace(request, token_ids=self._begin(beginning, prefix))

    def _begin(self, beginning: str | Sequence[int], prefix: list[int]) -> list[int]:
        ids = prepare_prompt(beginning, prefix, (), self.tokenizer, self.manifest.target).ids
        if not ids:
            raise RequestError("It begins with nothing; pass text or token ids, or ask for `n` samples.")
        return ids

    def _later(
        self, prompt: LatePrompt, place: int, prefix: list[int]
    ) -> Callable[[Mapping[int, Generation], float], list[int] | None]:
        """The token ids of a late prompt, checked once they are known."""

        def late(ended: Mapping[int, Generation], seconds: float) -> list[int] | None:
            beginning = prompt(ended, seconds)
            try:
                return None if beginning is None else self._begin(beginning, prefix)
            except RequestError as error:
                raise RequestError(f"Branch {place}: {error}") from None

        return late


def _check_mode(mode: Mode, target: Geometry) -> None:
    if target.branches < 2:
        raise RequestError("The plan serves one branch; build it with capacity.branches of 2 to 128 for more.")
    if mode not in MODES:
        raise RequestError(f"mode is {shown(mode)}; choose one of {', '.join(MODES)}.")
    if mode == "batching" and target.rows < 2:
        raise RequestError("The plan has one row for all branches; build it with capacity.batching for mode batching.")


def _mappings(branches: Sequence[BranchPrompt]) -> list[Mapping[str, Any]]:
    if isinstance(branches, str) or not isinstance(branches, Sequence | np.ndarray):
        raise RequestError(
            f"`branches` is of type {type(branches).__name__}; pass a list, of a text or token ids a branch."
        )
    if not len(branches):
        raise RequestError("`branches` is empty; there is nothing to continue.")
    return [branch if isinstance(branch, Mapping) else {"prompt": branch} for branch in branches]
