"""`suite`: drafters against plain decoding on a user's question files, by category."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from outrider import Session
from outrider.plans.machine import peak_rss_bytes
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer
from outrider.runtime.backends import choose_backend
from outrider.runtime.backends.base import check_threads
from outrider.runtime.options.options import Options
from outrider.tools.bench.prompts import Prompts
from outrider.tools.bench.questions import Conversation, Question, read_questions
from outrider.tools.bench.rows import rows_of
from outrider.tools.bench.runs import Run, cost_of, generate, load, mode_of
from outrider.tools.bench.shapes import Variant
from outrider.tools.bench.variants import plan_to_measure
from outrider.tools.measuring import measuring, run_in_turn, turns


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for plain decoding and for every variant, with the figures of every category, as `latency` has them of
    tasks.

    All that can be refused is refused before a plan is built, and that before anything is measured.
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
    categories = Counter(question.category for question in talks.questions)
    task = next(iter(categories)) if len(categories) == 1 else None
    auto_disable = not options.keep_drafting
    runtime, shared = load(options, plan, task=task, auto_disable=auto_disable, form=None)
    session = runtime.session()
    settings = options.sampling | Options(
        max_new_tokens=options.new,
        auto_disable=auto_disable,
        remember=False,  # or every repetition would draft from the answer of the one before
    )

    def run(variant: Variant, index: int, _: int) -> list[Run]:
        return talks.ask(session, variant.name, index, settings)

    places = range(len(sizes))
    planned = turns(variants, places, options.reps, places[:1])
    costs = [sum(cost_of(size, options.new) for size in sizes[index]) for _, _, index, _ in planned]
    with measuring(costs) as begin:
        found = run_in_turn(variants, places, options.reps, run, begin=begin)
    prompts = talks.measured()
    modes = [mode_of(variant, options, list(chain.from_iterable(runs))) for variant, runs in found.items()]
    rows = rows_of(session, modes, prompts, settings, shared | {"peak_rss_bytes": peak_rss_bytes()})
    about = {
        "files": [str(path) for path in options.files],
        "questions": len(sizes),
        "questions_by_category": dict(categories),
        "turns": len(prompts.ids),
        "chat_template": talks.conversation.templated,
        "most_new_tokens": options.new,
    }
    return {"plan": str(options.plan), "suite": about, "rows": rows}
