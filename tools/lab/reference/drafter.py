"""Shared by the trainings of all drafters: the target, the text, the loop, and the held-out measurement."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.plans.errors import CheckpointError
from outrider.tools.lab.reference.acceptance import (
    DEPTHS,
    Continuation,
    Drafts,
    continue_prompts,
    measure,
    read_prompts,
)
from outrider.tools.lab.reference.corpus import SourceFile, listed_hashes
from outrider.tools.lab.reference.data import Windows, load_corpus
from outrider.tools.lab.reference.drafter_text import ROWS, DrafterText, GeneratedText
from outrider.tools.lab.reference.loop import Batch, Run, Schedule, Training, window_at
from outrider.tools.lab.reference.teacher import Teacher

GENERATION_SHARE = 0.125
"""Of a drafter's minutes: the target writes text for so long, once for all drafters of a work folder."""
STEP_TOKENS = {"cpu": 4096, "cuda": 32768}
WINDOWS: Schedule = ((0.0, 512), (0.85, 1024), (0.95, 2048))
MUON_LR = 1e-2
"""A drafter is a layer or two that start far from their place: against 4e-3, a head's loss is a tenth lower after 60
steps."""
SAMPLE = 5
"""One in SAMPLE continuations is measured at a checkpoint; at the end, all."""


@dataclass(frozen=True)
class Lessons:
    """Teaching material of a drafter. `streams` are the token streams that its vocabulary is counted in."""

    teacher: Teacher
    text: DrafterText
    streams: list[NDArray[np.uint16]]
    continuations: list[Continuation]
    windows: Schedule
    step_tokens: int


def prepare(run: Run, files: list[SourceFile], step_tokens: int | None = None) -> Lessons:
    """Load the target of `run.out`, have it write text for its share of `run.minutes`, and continue held-out prompts.

    No training file may hold the text of a held-out one. Raises `CheckpointError` where the target or the prompts
    are missing.
    """
    run.work.mkdir(parents=True, exist_ok=True)
    prompts, listed = run.out / "held_out.jsonl.gz", run.out / "corpus.txt.gz"
    if not prompts.exists():
        raise CheckpointError(f"{prompts} does not exist; train the target into {run.out} first, or use --lists-only")
    teacher = Teacher.load(run.out / "target", run.device)
    kept_out = listed_hashes(listed, held_out=True) if listed.exists() else set()
    corpus = load_corpus(teacher.tokenizer, [f for f in files if f.held_out or f.sha256 not in kept_out])
    windows = Windows(corpus.train_code, corpus.tasks, seed=1)
    generated = GeneratedText(run.work, teacher)
    kind = teacher.device.type
    generated.grow(run.minutes * 60 * GENERATION_SHARE, windows, ROWS[kind])
    print("continuing the held-out prompts ...", flush=True)
    return Lessons(
        teacher,
        DrafterText(windows, generated.rows, seed=0),
        [corpus.train_code, generated.rows],
        continue_prompts(teacher, read_prompts(prompts)),
        WINDOWS,
        step_tokens or STEP_TOKENS[kind],
    )


def teach(
    run: Run,
    lessons: Lessons,
    training: Training,
    loss: Callable[[Tensor], Tensor],
    drafts: Drafts,
    taps: tuple[int, ...],
    depths: int = DEPTHS,
) -> None:
    """Train a drafter for its share of `run.minutes` by the `loss` of ids `[batch, length + 1]`.

    The text of the next step is cut in a thread while this one computes.
    """
    device = lessons.teacher.device
    if training.resume(run.device):
        lessons.text.reseed(training.step)

    def cut(progress: float) -> NDArray[np.int64]:
        length = window_at(lessons.windows, progress)
        return lessons.text.batch(max(1, lessons.step_tokens // length), length)

    ahead: deque[Future[NDArray[np.int64]]] = deque()

    def take(progress: float) -> Batch:
        ahead.append(thread.submit(cut, progress))
        if len(ahead) == 1:
            ahead.append(thread.submit(cut, progress))
        ids = torch.from_numpy(ahead.popleft().result()).to(device)
        rows, length = len(ids), ids.shape[1] - 1
        return Batch(loss(ids), rows * length, f"window {length}")

    def saved() -> None:
        shares = measure(lessons.teacher, _sample(lessons.continuations), drafts, taps, depths)
        print(f"step {training.step} held-out acceptance by depth (sample): {shares}", flush=True)

    with ThreadPoolExecutor(1) as thread:
        training.run(replace(run, minutes=run.minutes * (1 - GENERATION_SHARE)), take, saved)


def principal_axes(embedding: Tensor, width: int) -> Tensor | None:
    """`[Ht, width]`: the directions in which the target's embedding varies most; None where it has too few."""
    if width > embedding.shape[1]:
        return None
    axes: Tensor = torch.linalg.svd(embedding.detach().float(), full_matrices=False).Vh[:width]
    return axes.T


def _sample(continuations: list[Continuation]) -> list[Continuation]:
    """Every SAMPLE-th prompt's continuations, which lie two by two."""
    return [c for index, c in enumerate(continuations) if index // 2 % SAMPLE == 0]
