"""Compare a built plan with its checkpoint in PyTorch (`oracle.py`) on held-out text, and every drafter's runs with
plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch

from outrider import Runtime
from outrider.compiler.drafters import source_hashes
from outrider.compiler.held_out import read_prompts
from outrider.compiler.identity import plan_identity
from outrider.compiler.opening import stores_integers
from outrider.compiler.recipe import Recipe, check_same_recipe
from outrider.plans.backends import BACKENDS
from outrider.plans.errors import PlanError, RequestError
from outrider.plans.manifest import Manifest, rejects
from outrider.plans.plan import open_plan
from outrider.runtime.backends import choose_backend
from outrider.runtime.options.options import Options
from outrider.tools.bench.prompts import held_out_of
from outrider.tools.parting import Parting
from outrider.tools.verify.agreement import DrafterCheck, compare_drafters
from outrider.tools.verify.exactness import ExactnessCheck, check_chunks, check_ops
from outrider.tools.verify.oracle import Oracle, OracleChoice, load_oracle
from outrider.tools.verify.partial_check import PartialCheck, check_partial
from outrider.tools.verify.quantized import QUANTIZED_LOGIT_BOUND, QuantizationCheck, plan_weights

LOGIT_BOUND = 1e-3
"""Largest difference of two logits (of some tens, fp32) that order of summation explains.

Plans agree with PyTorch to about 1e-5, and our PyTorch module with transformers to 1e-4, which its tests demand. Ten
times that leaves room for deep models; a wrong weight, mask or position is off by units.
"""
KV_LOGIT_BOUND = {"float16": 0.03, "int8": 0.5}
"""Largest difference of two logits that rounding keys and values to a KV cache's type explains.

On the reference model, 1,536 positions after 24 held-out prompts against a float32 cache: float16 0.002 at the median
and 0.007 at most, int8 0.05 and 0.14. Room of four times for deeper models and longer contexts; a scale or slot that is
wrong is off by units.
"""
SAMPLED = Options(temperature=0.8, top_p=0.95, seed=1)


@dataclass
class Verification:
    """Measurements against an `oracle`, and the verdict.

    Of a plan with quantised weights the oracle has the same weights, and `quantization` says what they cost.
    `logit_bound` is absolute: it is what the plan cannot talk itself out of. `tolerance` is twice the largest logit
    error (closer logits than that may change places), but at most the bound. `divergences` are tokens of the plan's
    greedy runs that the oracle, given the same tokens before, would not have chosen, with the logits by which it
    prefers its own. `drafters` holds the drafters' greedy runs, `sampled` those at SAMPLED, of which drafters by
    rejection have none. `partial_kv` is None where no partial KV cache serves, `exactness` where the backend promises
    none.
    """

    oracle: str = ""
    prompts: int = 0
    tokens: int = 0
    max_logit_error: float = 0.0
    logit_bound: float = LOGIT_BOUND
    tolerance: float = 0.0
    equal_runs: int = 0
    divergences: list[Parting] = field(default_factory=list)
    drafters: dict[str, DrafterCheck] = field(default_factory=dict)
    sampled: dict[str, DrafterCheck] = field(default_factory=dict)
    partial_kv: PartialCheck | None = None
    quantization: QuantizationCheck | None = None
    exactness: ExactnessCheck | None = None

    @property
    def passed(self) -> bool:
        tied = all(d.near_tie for d in self.divergences)
        tied &= all(check.passed for check in (*self.drafters.values(), *self.sampled.values()))
        exact = all(check is None or check.passed for check in (self.partial_kv, self.exactness))
        return self.max_logit_error <= self.logit_bound and tied and exact  # NaN fails

    def to_json(self) -> dict[str, object]:
        """JSON has no NaN and no infinity: an error that is not finite is null."""
        error = self.max_logit_error if math.isfinite(self.max_logit_error) else None
        kinds = {"drafters": self.drafters, "sampled": self.sampled}
        checks = {kind: {name: c.to_json() for name, c in found.items()} for kind, found in kinds.items()}
        partial = None if self.partial_kv is None else self.partial_kv.to_json()
        cost = None if self.quantization is None else self.quantization.to_json()
        exactness = None if self.exactness is None else self.exactness.to_json()
        return (
            asdict(self)
            | checks
            | {"partial_kv": partial, "quantization": cost, "exactness": exactness}
            | {"max_logit_error": error, "passed": self.passed}
        )


@dataclass(frozen=True)
class Extent:
    """How much is compared: `prompts` of the file `held_out` (default: the recipe's), `new_tokens` greedy tokens after
    each; and what quantised weights cost on the first `texts` of them, None: on all."""

    held_out: Path | None = None
    prompts: int = 8
    new_tokens: int = 64
    texts: int | None = None


def verify_plan(
    recipe: Recipe,
    plan: Path,
    extent: Extent,
    *,
    oracle: OracleChoice = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Run prompts greedily on the plan and on the `oracle`.

    Every position's logits are compared along the plan's own sequence, so one early difference does not
    hide later errors. Every drafter of the plan runs the same prompts, greedily and at SAMPLED, and must give the
    tokens of plain decoding. With partial KV they run after long contexts too, in every mode: lossless must give the
    tokens of full KV, and how far lossy drifts is reported. On a backend that promises exactness every op, and the
    target in chunks, is probed on this machine. `progress` gets pieces of work done, and of how many.
    Raises `RequestError` when the recipe names no held-out text, for numbers of prompts or tokens that cannot be run
    or an oracle that is not installed, `CheckpointError` where the oracle cannot load the checkpoint,
    `PlanError` when the plan was built from something else.
    """
    if extent.prompts < 1:
        raise RequestError(f"prompts is {extent.prompts}; run at least 1.")
    texts = read_prompts(extent.held_out or held_out_of(recipe))
    opened = open_plan(plan)
    check_same_source(recipe, plan, opened.manifest)
    backend = choose_backend(opened.manifest.backends, None).backend
    exactness = check_ops(opened, backend) if BACKENDS[backend].exact else None
    refused = exactness is not None and not exactness.passed
    runtime = Runtime.load(plan, verify=False, exactness="unchecked" if refused else "probed")
    weights = plan_weights(recipe)
    model = load_oracle(recipe, oracle, weights)
    result = Verification(oracle=model.name, prompts=min(extent.prompts, len(texts)), exactness=exactness)
    result.logit_bound = KV_LOGIT_BOUND.get(recipe.kv_cache or "", LOGIT_BOUND)
    checkpoint = None
    if weights is not None:
        checkpoint, result.quantization = load_oracle(recipe, oracle), QuantizationCheck()
    if weights is not None or stores_integers(recipe.checkpoint_path, recipe.rope_scaling):
        result.logit_bound = max(result.logit_bound, QUANTIZED_LOGIT_BOUND)
    longest = runtime.manifest.target.context - extent.new_tokens - 1
    if longest < 1:
        raise RequestError(
            f"new_tokens is {extent.new_tokens}, but the plan's context is {runtime.manifest.target.context}; lower it."
        )
    measured = [] if checkpoint is None else texts[: extent.texts]
    pieces = (3 + (runtime.manifest.partial_kv is not None)) * result.prompts + len(measured)
    done = count(1)

    def advance() -> None:
        progress(next(done), pieces)

    def encode(text: str) -> list[int]:
        return runtime.tokenizer.encode(text)[-min(longest, 1024) :]

    encoded = [encode(text) for text in texts[: extent.prompts]]
    for index, ids in enumerate(encoded):
        _compare(runtime, model, checkpoint, ids, index, extent.new_tokens, result)
        advance()
    result.tolerance = min(result.logit_bound, 2 * result.max_logit_error)  # in this order, NaN gives the bound
    result.divergences = [replace(d, near_tie=d.margin <= result.tolerance) for d in result.divergences]
    if not math.isfinite(result.max_logit_error):
        return result
    if checkpoint is not None and result.quantization is not None:
        for ids in map(encode, measured):
            size = len(runtime.tokenizer.decode(ids[1:]).encode())
            result.quantization.add_text(ids, size, model.logits(ids, len(ids)), checkpoint.logits(ids, len(ids)))
            advance()
    session, limit = runtime.session(), Options(max_new_tokens=extent.new_tokens)
    if exactness is not None:
        check_chunks(session, max(encoded, key=len), exactness)

    def compare(names: list[str], options: Options) -> dict[str, DrafterCheck]:
        exact = BACKENDS[runtime.backend].exact
        merged: Options = options | limit
        return compare_drafters(session, encoded, names, merged, result.tolerance, exact=exact, advance=advance)

    drafters = runtime.manifest.drafters
    result.drafters = compare([d.name for d in drafters], Options(temperature=0.0))
    result.sampled = compare([d.name for d in drafters if not rejects([d])], SAMPLED)
    result.partial_kv = check_partial(session, runtime.manifest, encoded, extent.new_tokens, advance)
    return result


def check_same_source(recipe: Recipe, plan: Path, manifest: Manifest) -> None:
    """Raise `PlanError` unless the plan was built from this recipe and the checkpoint as it is now.

    The compiler may have changed since: whether that matters is what `verify` measures.
    """
    check_same_recipe(recipe, plan, manifest)
    if plan_identity(manifest.recipe, source_hashes(recipe), manifest.tools) != manifest.identity:
        raise PlanError(
            f"{plan} was not built from {recipe.checkpoint_path} and the drafters as they are now: a checkpoint's "
            "files are others; build the plan again, or bring back the checkpoint"
        )


def _compare(
    runtime: Runtime,
    oracle: Oracle,
    checkpoint: Oracle | None,
    ids: list[int],
    prompt: int,
    new_tokens: int,
    result: Verification,
) -> None:
    session = runtime.session()
    rows: list[np.ndarray] = []
    generated: list[int] = []
    try:
        options = Options(max_new_tokens=new_tokens, drafter="none", partial_kv="off", ignore_eos=True, logprobs=0)
        for span in session.stream(ids, **options):
            if span.token_ids:
                rows.append(session.step_logits(0).copy())
                generated += span.token_ids
    except PlanError:  # no token is chosen from logits that are not numbers: the plan's fault, and so a verdict
        if not np.isnan(session.step_logits(0)).any():
            raise
        result.max_logit_error = math.nan
        return
    expected = oracle.logits(ids + generated[:-1], len(generated))
    found = np.stack(rows)
    error = np.abs(found - expected.numpy())
    if checkpoint is not None and result.quantization is not None:
        result.quantization.add_run(torch.from_numpy(found), checkpoint.logits(ids + generated[:-1], len(generated)))
    result.tokens += len(generated)
    result.max_logit_error = float(np.maximum(result.max_logit_error, error.max()))  # NaN stays
    choices = expected.argmax(dim=-1).tolist()
    parted = [i for i in range(len(generated)) if generated[i] != choices[i]]
    result.equal_runs += not parted
    for i in parted:
        margin = float(expected[i, choices[i]] - expected[i, generated[i]])
        result.divergences.append(Parting(prompt, len(ids), i, choices[i], generated[i], margin))
