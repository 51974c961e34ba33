"""The facade of a loaded plan: sessions, generation, requests, branches and beam search."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import NoReturn, Self, Unpack, cast, get_args, overload

import numpy as np

from outrider.plans.backends import BACKENDS
from outrider.plans.errors import ClosedError, RequestError
from outrider.plans.manifest import Manifest, Probe
from outrider.plans.plan import Plan, open_plan
from outrider.plans.skeleton import read_skeleton
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends import DRIVERS, BackendChoice, choose_backend
from outrider.runtime.backends.base import Settings
from outrider.runtime.backends.shared_engines import SharedEngines
from outrider.runtime.beam_search import BeamOptions, BeamResult, beam_search
from outrider.runtime.branch_request import BranchPrompt, Mode, check_alone, check_branches
from outrider.runtime.branch_run import run_branches
from outrider.runtime.drafters import make_memories
from outrider.runtime.exactness import Exactness, ProbeResult, ensure_exact, kernels_here
from outrider.runtime.execution.assembly import LoadedPlan
from outrider.runtime.files import MappedFiles, check_not_replaced
from outrider.runtime.generation import Generation, Run, Stream
from outrider.runtime.handle import Handle
from outrider.runtime.memory import MemoryUse, memory_use
from outrider.runtime.options.options import Options
from outrider.runtime.options.request import Request
from outrider.runtime.pass_prices import load_prices
from outrider.runtime.prefix_cache.cache import PrefixCache, PrefixCacheConfig, state_shapes, token_shapes
from outrider.runtime.prefix_cache.file import load_prefix_cache, save_prefix_cache
from outrider.runtime.scheduler import Scheduler, SchedulerConfig, check_place_in_queue
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.session import Session
from outrider.runtime.stats import Stats
from outrider.runtime.step_loop_pool import StepLoopPool
from outrider.runtime.text.grammars import Grammars
from outrider.runtime.text.prompt import Messages, TemplateVariables, choose_prompt, prepare_prompt

MAX_THREADS = 1024
_LOG = logging.getLogger("outrider")


def check_threads(threads: int) -> None:
    """Raise `RequestError` unless `threads` is a number of threads."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MAX_THREADS:
        raise RequestError(
            f"threads is {threads!r}; pass a whole number from 0 (the backend chooses) to {MAX_THREADS}."
        )


def check_exactness(exactness: str) -> None:
    """Raise `RequestError` unless `exactness` is one of `Exactness`."""
    if exactness not in get_args(Exactness):
        raise RequestError(f"exactness is {exactness!r}; pass one of {', '.join(get_args(Exactness))}.")


class Runtime:
    """A plan in memory: engines and tokenizer, shared by any number of sessions.

    `backend` is the one that runs; `passed_over` says why better ones of the plan do not. `probed` says what is known
    of its exactness on this machine; None for a backend that promises none, and where it is unchecked. `skeleton` has
    the plan's settings of skeleton-of-thought. Safe to use from several threads. `Runtime.load` makes one.
    """

    def __init__(
        self,
        plan: Plan,
        chosen: BackendChoice,
        settings: Settings,
        files: MappedFiles,
        prefix_cache: PrefixCacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        exactness: Exactness = "probed",
    ) -> None:
        self._plan, self.backend, self.passed_over = plan, chosen.backend, chosen.passed_over
        self.skeleton = read_skeleton(plan)
        backend_plan = plan.manifest.backends[self.backend]
        self.probed = _probe(plan, backend_plan.probe, settings.threads, exactness)
        driver = DRIVERS[self.backend].make(backend_plan, settings)
        engines = {name: driver.load(plan.file(engine.file), engine) for name, engine in backend_plan.engines.items()}
        self.tokenizer = Tokenizer.load(plan.root / "tokenizer", plan.manifest.text.special_tokens)
        self.grammars = Grammars(self.tokenizer, plan.manifest.target.vocab_size)
        memories, prices = make_memories(plan.manifest.drafters), load_prices(plan, self.backend, settings.threads)
        shared = self.tokenizer, self.grammars, memories, prices, files
        check_not_replaced(plan)
        self.loaded = LoadedPlan(plan.manifest, backend_plan, driver, engines, *shared)
        self.prefix_cache = None
        if prefix_cache is not None:
            self.prefix_cache = PrefixCache(
                token_shapes(backend_plan), prefix_cache, driver.kv_memory, state_shapes(backend_plan)
            )
        self.scheduler_config = scheduler or SchedulerConfig()
        self._scheduler: Scheduler | None = None
        self._making, self._closed = threading.Lock(), False
        self.engines = StepLoopPool(self.loaded, self.prefix_cache)

    @classmethod
    def load(
        cls,
        plan: str | PathLike[str],
        *,
        backend: str | None = None,
        threads: int = 0,
        verify: bool = True,
        cuda_graphs: bool = True,
        prefix_cache: PrefixCacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        exactness: Exactness = "probed",
        share_memory: bool = False,
    ) -> Runtime:
        """Open the plan folder `plan` and load its engines for `backend` (default: the best this machine drives).

        `threads` are those of the target and of large drafters; 0 lets the backend choose. `verify=False` skips the
        sha256 of the files (sizes are still checked). On a GPU every session first records the rounds that it will
        come to, a few seconds; without `cuda_graphs` it launches them kernel by kernel. With `prefix_cache`, all
        sessions and one-off generations find what was computed of earlier sequences; its memory is taken here, where
        the backend has KV. `scheduler` says how `submit` serves requests. On the CPU, a plan that runs on a machine for
        the first time is probed, in less than 100 ms: whether drafts and neighbours leave every bit of a token as it
        is. It is refused where they do not, unless `exactness` is "unchecked", which gives that promise up.
        `share_memory` is for several processes on one machine: on the CPU they map what ONNX Runtime packs of float
        weights, from a file in the user's cache folder that the first of them writes, and take memory for KV as it is
        written, not in huge pages. Raises `PlanError`, and `RequestError` for a wrong number of threads or a cache that
        cannot be.
        """
        check_threads(threads)
        check_exactness(exactness)
        opened = open_plan(Path(plan), verify=verify)
        chosen = choose_backend(opened.manifest.backends, backend)
        share = share_memory and BACKENDS[chosen.backend].on_processor
        files = MappedFiles.from_plan(opened, chosen.backend)
        shared_engines = SharedEngines.from_plan(opened, kernels_here(), files, verify) if share else None
        return cls(
            opened,
            chosen,
            Settings(threads, cuda_graphs, share, shared_engines),
            files,
            prefix_cache,
            scheduler,
            exactness,
        )

    @property
    def manifest(self) -> Manifest:
        return self._plan.manifest

    def session(self) -> Session:
        """A new, empty sequence, with an engine to itself from its first use until it is closed.

        Raises ClosedError once the runtime is closed.
        """
        self._check_open()
        return Session(self.engines)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, and one prompt
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], **options: Unpack[Options]
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """Generate from `prompt` (text or token ids) on a sequence of its own, or from each of a list of prompts.

        In place of a prompt, `messages` are a conversation, such as `[{"role": "user", "content": "..."}]`: the plan's
        chat template makes a prompt of them, and what is generated is the next message. `chat_template_kwargs` are
        values of further names that the template reads, such as `{"enable_thinking": False}`.

        Several are served at once, or one after another where the plan has one branch, with the tokens that each would
        get alone.

        Of the `options`, all of which `outrider options` explains, these are asked for most: `max_new_tokens` (128),
        `temperature` (0: greedy), `top_k`, `top_p`, `min_p`, `seed`, `stop` (texts), `drafter` (a name, or "none"),
        `logprobs` (how many), `structured_outputs` (such as `{"json": schema}`), `ignore_eos` (False).

        Raises RequestError, before anything runs.
        """
        if messages is not None or _is_one(prompt):
            one = cast("str | Sequence[int] | None", prompt)
            return self.stream(one, messages=messages, chat_template_kwargs=chat_template_kwargs, **options).result
        prompts = cast("Sequence[str | Sequence[int]]", prompt)
        asked = [self._ask(self._choose(each, None, chat_template_kwargs), options) for each in prompts]
        handles: list[Handle] = []
        try:
            for each in asked:
                handles += self._serve().submit([each], wait=True)  # a failure leaves the handles before it in the list
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()  # the unfinished ones, where one has failed

    def count_tokens(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
    ) -> int:
        """Number of tokens of a prompt that `generate` takes, or of messages; special ones of the tokenizer included.

        Raises RequestError for what `generate` refuses, such as a text that does not fit the context.
        """
        chosen = self._choose(prompt, messages, chat_template_kwargs)
        return len(prepare_prompt(chosen, [], [], self.tokenizer, self.manifest.target).ids)

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        priority: int = 0,
        deadline: float | None = None,
        client: str | None = None,
        **options: Unpack[Options],
    ) -> Handle:
        """Have `prompt`, or `messages` as in `generate`, served beside others, in a thread of the runtime's own.

        Of one client those of a higher `priority` begin first, and clients take turns: `client` names who asks, where
        each may have a share of the queue. A request that is not over `deadline` seconds from now ends with what it
        has. Tokens are those that `generate` gives. On a plan of several branches a pass serves all that live; a plan
        of one branch serves one request at a time. `on_round` is called in a thread of the runtime. Raises
        RequestError, BusyError where too many wait, and ClosedError once the runtime is closed.
        """
        chosen = self._choose(prompt, messages, chat_template_kwargs)
        return self.submit_all([(chosen, options)], priority=priority, deadline=deadline, client=client)[0]

    def submit_all(
        self,
        asked: Sequence[tuple[str | Sequence[int], Options]],
        *,
        priority: int = 0,
        deadline: float | None = None,
        client: str | None = None,
    ) -> list[Handle]:
        """Submit several prompts, each with options of its own, all of them or none; see `submit`."""
        check_place_in_queue(priority, deadline)
        requests = [self._ask(*each) for each in asked]
        return self._serve().submit(requests, priority, deadline, client=client)

    def _ask(self, prompt: str | Sequence[int], options: Options) -> Request:
        return self._check(prompt, options, shared=self.scheduler_config.shares_rows(self.manifest.target))

    def _check(self, prompt: str | Sequence[int], options: Options, *, shared: bool = False) -> Request:
        return check_alone(prompt, options, self.manifest, self.grammars, self.tokenizer, shared=shared)

    def _choose(
        self, prompt: str | Sequence[int] | None, messages: Messages | None, variables: TemplateVariables | None
    ) -> str | Sequence[int]:
        return choose_prompt(prompt, messages, self.tokenizer, self.manifest.target, variables)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The runtime takes no more requests: it was closed.")

    def _serve(self) -> Scheduler:
        with self._making:
            self._check_open()
            if self._scheduler is None:
                self._scheduler = Scheduler(self.engines, self.scheduler_config)
            return self._scheduler

    def memory(self) -> MemoryUse:
        """Memory held now beside the weights, in bytes."""
        return memory_use(self.loaded.plan, self.engines)

    def save_prefix_cache(self, path: str | PathLike[str]) -> int:
        """Write the contents of the prefix cache to a file; return the number of tokens written.

        Raises RequestError without a cache, and where the file's folder does not exist.
        """
        return save_prefix_cache(self._cache(), Path(path), self._bound_to())

    def load_prefix_cache(self, path: str | PathLike[str]) -> int:
        """Load a saved prefix cache; return the number of tokens added.

        Raises RequestError without a cache, and PlanError for a file that is damaged, or that another plan, processor,
        or build of ONNX Runtime or our ops has made: its KV would not be, bit for bit, what is computed here.
        """
        return load_prefix_cache(self._cache(), Path(path), self._bound_to(), self.manifest.target.context)

    def _cache(self) -> PrefixCache:
        if self.prefix_cache is None:
            raise RequestError("The runtime has no prefix cache; load the plan with prefix_cache=PrefixCacheConfig().")
        return self.prefix_cache

    def _bound_to(self) -> dict[str, str]:
        return {"plan": self.manifest.identity, "backend": self.backend} | kernels_here()

    def start(self) -> None:
        """Prepare the scheduler now; else the first `submit` does, and waits for it. Raises RequestError as `submit`
        does.
        """
        self._serve()

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """Statistics of all submitted requests together."""
        return SchedulerStats() if self._scheduler is None else self._scheduler.stats

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests, and finish those of `submit` or, without `drain`, cancel them. Sessions and streams
        that are open continue. So ends a `with` statement.

        Returns whether all were finished after at most `timeout` seconds.
        """
        with self._making:
            self._closed = True
            scheduler = self._scheduler
        return True if scheduler is None else scheduler.close(drain=drain, timeout=timeout)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Runtime of {self.manifest.name!r} on {self.backend}{state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Runtime holds memory of its process; load the plan again in the other one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(drain=error is None)

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Generate as `generate` does, a span of tokens and text per step; no engine is taken before the first one."""
        self._check_open()
        return Stream(self._once(self._check(self._choose(prompt, messages, chat_template_kwargs), options)))

    def _once(self, asked: Request) -> Run:
        """Generate in a sequence of its own; no engine is taken before the first pass."""
        with Session(self.engines) as session:
            yield from session.run(asked.token_ids, asked, whole=True)

    def generate_branches(
        self,
        prompt: str | Sequence[int],
        branches: Sequence[BranchPrompt] | None = None,
        *,
        n: int | None = None,
        max_parallel: int | None = None,
        mode: Mode = "in-one-sequence",
        **options: Unpack[Options],
    ) -> list[Generation]:
        """Continue `prompt` in every branch, all at once; see `stream_branches`."""
        return self.stream_branches(prompt, branches, n=n, max_parallel=max_parallel, mode=mode, **options).results

    def stream_branches(
        self,
        prompt: str | Sequence[int],
        branches: Sequence[BranchPrompt] | None = None,
        *,
        n: int | None = None,
        max_parallel: int | None = None,
        mode: Mode = "in-one-sequence",
        keep_for: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> Stream:
        """Continue `prompt` in several branches that share its KV, spans of all of them as they come.

        A branch is a text or token ids after the prompt, or a mapping of `prompt` and options of its own; those
        given here hold for all. In place of `branches`, `n` is a number of samples of the prompt itself. At most
        `max_parallel` branches live at once (default: as many as the plan has); others follow as these end, those
        with the most `predicted_tokens` first (a key of a branch's mapping; default: its `max_new_tokens`).

        The `prompt` of a mapping may also be a function, which is called until it knows how the branch begins, with
        the generations that have ended (`branch_request.LatePrompt`).

        A run after the prompt of the run before it, in the same mode, finds its KV, unless it asks drafters with an
        engine that no branch asked before. `keep_for` names such drafters beforehand. A prefix cache finds it after
        other runs too.

        In mode "in-one-sequence" all share one row of the KV cache, and the prompt's KV is there once. In "batching"
        each has a row, with a copy of the prompt's; the plan must have them. Tokens are the same.

        Each branch gets the tokens that it would get alone, after prompt and beginning, with its `stream_id`: that
        given, plus the branch's place. Raises RequestError, before anything runs.
        """
        self._check_open()
        asked = check_branches(self.manifest, self.grammars, self.tokenizer, prompt, branches, n, mode, options)
        most = self.manifest.target.branches
        parallel = most if max_parallel is None else max_parallel
        if isinstance(parallel, bool) or not isinstance(parallel, int) or not 1 <= parallel <= most:
            raise RequestError(f"max_parallel is {max_parallel!r}; pass a whole number from 1 to {most}.")
        drafters = ["none", *(drafter.name for drafter in self.manifest.drafters)]
        if wrong := [name for name in keep_for if name not in drafters]:
            raise RequestError(f"keep_for names {wrong[0]!r}; the plan has the drafters {', '.join(drafters)}.")
        stats = Stats(sequences=len(asked[1]))
        return Stream(self._branches(*asked, parallel, mode, stats, keep_for), stats)

    def _branches(
        self,
        prefix: list[int],
        asked: list[Request],
        parallel: int,
        mode: Mode,
        stats: Stats,
        keep_for: Sequence[str],
    ) -> Run:
        engine = self.engines.borrow()
        try:
            yield from run_branches(engine, prefix, asked, parallel, mode, stats, keep_for)
        finally:
            self.engines.give_back(engine)  # the next borrower begins afresh, however this run ended

    def beam_search(self, prompt: str | Sequence[int], **options: Unpack[BeamOptions]) -> list[BeamResult]:
        """Return the most probable continuations of `prompt` by beam search, best first. Raises RequestError."""
        with self.session() as session:
            return beam_search(session, prompt, **options)


def _is_one(prompt: object) -> bool:
    """Whether it is one prompt: a text, or token ids, and no list of such."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not len(prompt):
        return True
    return isinstance(prompt[0], int | np.integer)


def _probe(plan: Plan, probe: Probe | None, threads: int, exactness: Exactness) -> ProbeResult | None:
    if probe is None:
        return None
    if exactness == "unchecked":
        _LOG.warning("%s runs unchecked: drafts and neighbours may change its tokens on this machine", plan.root)
        return None
    return ensure_exact(plan, probe, threads)
