"""`suite`: drafters against plain decoding on a user's question files, by category."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider import Runtime, Session
from outrider.commands.console import progress_bar
from outrider.plans.machine import peak_rss_bytes
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer
from outrider.runtime.backends import choose_backend
from outrider.runtime.request import Options
from outrider.runtime.runtime import check_threads
from outrider.tools.bench.alternating import alternate, compare, generate
from outrider.tools.bench.conversation import Conversation
from outrider.tools.bench.identity import identity_columns, plan_columns
from outrider.tools.bench.latency import mode_of
from outrider.tools.bench.prompts import Prompts
from outrider.tools.bench.questions import Question, read_questions
from outrider.tools.bench.rows import Mode, Run, summary, variant_columns
from outrider.tools.bench.sampling import as_options
from outrider.tools.bench.shapes import Variant
from outrider.tools.bench.tasks import by_task
from outrider.tools.bench.time_left import Step, TimeLeft, guess_work
from outrider.tools.bench.variants import plan_to_measure


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for plain decoding and for every variant, with the figures of every category, as `latency` has them of
    tasks.

    Whatever can be refused is refused before a plan is built, and that before anything is measured.
    """
    check_threads(options.threads)
    manifest = read_manifest(options.plan)
    choose_backend(manifest.backends, options.backend)
    questions = read_questions(options.files, options.count)
    templated = not options.raw and (options.plan / "tokenizer" / CHAT_TEMPLATE_FILE).is_file()
    conversation = Conversation(Tokenizer.load(options.plan / "tokenizer"), manifest.target, templated)
    sizes = conversation.check_room(questions, options.new)
    with plan_to_measure(options) as (plan, variants):
        return _measure(options, plan, variants, _Talks(conversation, questions), sizes)


class _Talks:
    """Questions put to a session, turn after turn. A turn is a prompt, numbered through all questions.

    `prompts` are the token ids that plain decoding had, which answers before first: its own first ones are in them.
    """

    def __init__(self, conversation: Conversation, questions: Sequence[Question]) -> None:
        self.conversation, self.questions = conversation, questions
        self.prompts: dict[int, list[int]] = {}
        turns = [len(question.turns) for question in questions]
        self.first_turns = [sum(turns[:index]) for index in range(len(turns))]
        self.tasks = [question.category for question in questions for _ in question.turns]

    def ask(self, session: Session, drafter: str, index: int, settings: Options) -> list[Run]:
        """Go through one question with a drafter: a run a turn."""
        session.reset()
        question, first = self.questions[index], self.first_turns[index]
        answers: list[str] = []
        runs = []
        for place in range(len(question.turns)):
            ids = self.conversation.encode(question.turns[: 1 + place], answers)
            self.prompts.setdefault(first + place, ids)
            runs.append(generate(session, first + place, ids, drafter, settings))
            answers.append(runs[-1].generation.text)
        return runs

    def measured(self) -> Prompts:
        return Prompts([ids for _, ids in sorted(self.prompts.items())], list(self.tasks))


def _measure(
    options: argparse.Namespace, plan: Path, variants: Sequence[Variant], talks: _Talks, sizes: Sequence[list[int]]
) -> dict[str, Any]:
    started = perf_counter()
    runtime = Runtime.load(plan, backend=options.backend, threads=options.threads)
    load_ms = (perf_counter() - started) * 1000
    categories = Counter(question.category for question in talks.questions)
    task = next(iter(categories)) if len(categories) == 1 else None
    auto_disable = not options.keep_drafting
    shared = identity_columns(runtime, options) | {"task": task, "auto_disable": auto_disable, "form": None}
    costs = plan_columns(plan, runtime.manifest) | {"load_ms": load_ms}
    session = runtime.session()
    settings = as_options(options.sampling) | Options(
        max_new_tokens=options.new,
        auto_disable=auto_disable,
        remember=False,  # or every repetition would draft from the answer of the one before
    )
    modes = [mode_of(variant, options) for variant in variants]

    def step(variant: Variant, index: int) -> Step:
        return Step(variant.name, index, sum(guess_work(size, options.new) for size in sizes[index]))

    order = [0, *list(range(len(sizes))) * options.reps]
    with progress_bar("measuring") as progress:
        left = TimeLeft([step(variant, index) for variant in variants for index in order])

        def begin(mode: Mode, index: int, text: str) -> None:
            done, total, seconds = left.begin(step(mode.variant, index))
            progress(done, total, text, seconds)

        def ask(drafter: str, index: int) -> list[Run]:
            return talks.ask(session, drafter, index, settings)

        alternate(modes, len(sizes), options.reps, ask, begin)
        prompts = talks.measured()
        compare(session, modes, prompts.ids, settings)
    plain = modes[0].runs
    costs["peak_rss_bytes"] = peak_rss_bytes()
    rows = [
        shared
        | variant_columns(mode)
        | {"prompts_sha256": prompts.sha256}
        | summary(mode, plain)
        | {"by_task": by_task(mode.runs, plain, prompts)}
        | costs
        for mode in modes
    ]
    about = {
        "files": [str(path) for path in options.files],
        "questions": len(sizes),
        "questions_by_category": dict(categories),
        "turns": len(prompts.ids),
        "chat_template": talks.conversation.templated,
        "most_new_tokens": options.new,
    }
    return {"plan": str(options.plan), "suite": about, "rows": rows}
