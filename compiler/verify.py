"""Compare a built plan with PyTorch: logits on held-out text, greedy tokens, and where the two nearly tie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from compiler.checkpoint import load_decoder
from compiler.held_out import read_prompts
from compiler.models.decoder import Decoder
from compiler.models.eager import sequence_logits
from compiler.recipe import Recipe
from plans.errors import RecipeError, RequestError
from runtime import Runtime


@dataclass(frozen=True)
class Divergence:
    """Where a greedy run of the plan leaves PyTorch's: `index` counts generated tokens.

    `margin` is PyTorch's gap between its two best logits there; within the tolerance it is a near tie.
    """

    prompt: int
    index: int
    plan_token: int
    torch_token: int
    margin: float
    near_tie: bool


@dataclass
class Verification:
    """`tolerance` is twice the largest logit error: closer logits than that may change places."""

    prompts: int = 0
    tokens: int = 0
    max_logit_error: float = 0.0
    tolerance: float = 0.0
    equal_runs: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(d.near_tie for d in self.divergences) and bool(np.isfinite(self.max_logit_error))

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


def verify_plan(
    recipe: Recipe,
    plan: Path,
    *,
    prompts: int = 8,
    new_tokens: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Run `prompts` held-out prompts for `new_tokens` greedy tokens on the plan and in PyTorch.

    Every position's logits are compared along the plan's own sequence, so one early difference does not
    hide later errors. Raises `RecipeError` when the recipe names no held-out text, `RequestError` for numbers
    of prompts or tokens that cannot be run.
    """
    if prompts < 1:
        raise RequestError(f"prompts is {prompts}; run at least 1.")
    texts = _prompts(recipe)[:prompts]
    runtime = Runtime.load(plan)
    decoder = load_decoder(recipe.checkpoint_path, "float32", recipe.rope_scaling)
    result = Verification(prompts=len(texts))
    longest = runtime.manifest.model.context - new_tokens - 1
    if longest < 1:
        raise RequestError(
            f"new_tokens is {new_tokens}, but the plan's context is {runtime.manifest.model.context}; lower it."
        )
    for index, text in enumerate(texts):
        ids = runtime.tokenizer.encode(text)[-min(longest, 1024) :]
        _compare(runtime, decoder, ids, index, new_tokens, result)
        progress(index + 1, len(texts))
    result.tolerance = 2 * result.max_logit_error
    result.divergences = [
        Divergence(**(asdict(d) | {"near_tie": d.margin <= result.tolerance})) for d in result.divergences
    ]
    return result


def _prompts(recipe: Recipe) -> list[str]:
    if recipe.held_out_path is None:
        raise RecipeError(
            'The recipe has no held_out file; add `held_out: FILE.jsonl` with a {"prompt": ...} object per line.'
        )
    return read_prompts(recipe.held_out_path)


def _compare(
    runtime: Runtime, decoder: Decoder, ids: list[int], prompt: int, new_tokens: int, result: Verification
) -> None:
    session = runtime.session()
    rows: list[np.ndarray] = []
    generated: list[int] = []
    for span in session.stream(ids, max_new_tokens=new_tokens, drafter="none", ignore_eos=True):
        if span.token_ids:
            rows.append(session.step_logits(0).copy())
            generated += span.token_ids
    expected = sequence_logits(decoder, ids + generated[:-1])[len(ids) - 1 :]
    error = np.abs(np.stack(rows) - expected.numpy())
    result.tokens += len(generated)
    result.max_logit_error = float(np.maximum(result.max_logit_error, error.max()))  # NaN stays
    choices = expected.argmax(dim=-1).tolist()
    different = next((i for i, (a, b) in enumerate(zip(generated, choices, strict=True)) if a != b), None)
    if different is None:
        result.equal_runs += 1
        return
    best = torch.topk(expected[different], 2).values
    result.divergences.append(
        Divergence(prompt, different, generated[different], choices[different], float(best[0] - best[1]), False)
    )
