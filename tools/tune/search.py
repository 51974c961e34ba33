"""Choose a drafter's tree for this machine: what trees cost, what they would have had accepted, a race of the best.

Everything is measured on plans that are built for the purpose, from the recipe of the plan that is tuned:

1. One plan that holds the drafter several times, with trees of several `top_k` and depths. Its rounds on held-out
   prompts show what a draft costs; between measured depths that is interpolated, since every level does the same
   work. The deepest tree of each `top_k` keeps many nodes and is recorded: `replay` says what smaller ones would
   have had accepted.
2. On the same plan, the cost of verifying 1, 2, 3 ... nodes: the target's part of a speculative round, on chains.
3. A plan with the best few by (tokens per verify) / (verify + draft + host time), and with the tree that the plan has
   now. Plain decoding and they run alternately, and the wall clock decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from outrider import Generation, Runtime, Session
from outrider.compiler.build import build
from outrider.compiler.held_out import read_prompts
from outrider.compiler.recipe import Recipe, load_recipe
from outrider.compiler.recipe_drafters import BlockSection, GraphSection, reshaped
from outrider.plans.errors import RequestError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import GraphDrafter, Manifest, Tree
from outrider.plans.plan import read_manifest
from outrider.runtime.backends import choose_backend
from outrider.runtime.options.options import Options
from outrider.runtime.trace import RoundTrace, Watcher
from outrider.tools.bench.prompts import held_out_of
from outrider.tools.bench.variants import tokens_of_block
from outrider.tools.measuring import run_in_turn, within
from outrider.tools.tune.replay import DraftedTree, acceptance_by_depth, acceptance_by_rank, largest, tokens_per_verify
from outrider.tools.tune.table import Estimate, Timed, Tuning
from outrider.tools.verify.verification import check_same_source

Progress = Callable[[int, int, str], None]

_OPENING = 4  # tokens that take in the prompt, before rounds are timed
_RECORDED = 64  # nodes of a recorded tree: four times what it stands for
_COST_PROMPTS = 4
_VERIFY_REPEATS = 25
_RACES = 2  # runs of each prompt and tree
_PROBE = "probe"  # an n-gram drafter that is never asked to draft: its program verifies what it is given
_PLAIN = "none"


@dataclass(frozen=True)
class Search:
    """Trees to choose among: each of `top_ks` with every depth up to the last, and up to `nodes` nodes.

    The drafter's cost is measured at `depths`, two or more, of which the first is 0. The `finalists` best are timed.
    """

    top_ks: tuple[int, ...] = (1, 2, 3, 4)
    depths: tuple[int, ...] = (0, 2, 6)
    nodes: int = 16
    finalists: int = 3


@dataclass(frozen=True)
class Runs:
    """What trees are judged by: `count` prompts of the file `prompts` (default: the held-out ones), `new_tokens` after
    each, at a `temperature`. A tree that pays at one may not at another."""

    prompts: Path | None = None
    count: int = 8
    new_tokens: int = 128
    temperature: float = 0.0


@dataclass(frozen=True)
class Origin:
    """Where trees to try come from: the recipe read from `path` with `overrides`, and its drafter's section; and the
    backend that they are tried on."""

    path: Path
    overrides: tuple[str, ...]
    section: GraphSection
    backend: str

    def recipe(self, trees: Sequence[Tree], nodes: int) -> Recipe:
        """The recipe with this drafter alone, once for each tree and by the name of it; and the probe of `nodes`."""
        listed = [reshaped(self.section, name_of(tree), tree) for tree in trees]
        listed.append({"name": _PROBE, "kind": "ngram", "max_draft": nodes - 1})
        recipe = load_recipe(self.path, [*self.overrides, f"drafters={json.dumps(listed, ensure_ascii=False)}"])
        return recipe.for_backends([self.backend])


def name_of(tree: Tree) -> str:
    return f"k{tree.top_k}-d{tree.depth}-n{tree.nodes}"


def tune_plan(
    recipe: Recipe,
    plan: Path,
    runs: Runs,
    *,
    drafter: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Tuning:
    """Choose the tree of `drafter` (default: the plan's first that has one).

    `recipe` was read with `overrides`. Raises `RequestError`, `RecipeError` and `PlanError` for what cannot be tuned.
    """
    search, manifest = Search(), read_manifest(plan)
    settings = tunable(manifest, drafter)
    check_same_source(recipe, plan, manifest)
    section = next(d for d in recipe.drafters if d.name == settings.name)
    assert not isinstance(section, HostDrafter)
    context = manifest.target.context
    if runs.count < 1 or not 2 * search.nodes <= runs.new_tokens < context - 1:
        raise RequestError(
            f"count is {runs.count} and new is {runs.new_tokens}; pass at least 1 prompt, and from {2 * search.nodes} "
            f"to {context - 2} new tokens: the plan's context is {context}."
        )
    texts = read_prompts(runs.prompts or held_out_of(recipe))[: runs.count]
    known = manifest.models[settings.name].vocab_size
    widest = 1 if section.acceptance == "rejection" else known  # rejection goes with chains
    search = replace(search, top_ks=tuple(k for k in search.top_ks if k <= widest))
    if isinstance(section, BlockSection):
        search = _within_block(search, recipe, section)
    origin = Origin(recipe.path, tuple(overrides), section, choose_backend(manifest.backends, None).backend)
    bench = _Bench(origin, search, texts, runs, context, progress)
    found = Tuning(str(plan), manifest.identity, settings.name, len(texts), runs.new_tokens, runs.temperature)
    _estimate(found, bench, search)
    _race(found, bench, search, settings.tree)
    return found


def _within_block(search: Search, recipe: Recipe, section: BlockSection) -> Search:
    """Limit the depths of a search to what a block of the head drafts. Raises `RequestError` for a block of one."""
    deepest = tokens_of_block(recipe, section) - 1
    depths = tuple(dict.fromkeys(min(depth, deepest) for depth in search.depths))
    if len(depths) < 2:
        raise RequestError(f"A block of the drafter {section.name!r} drafts one token, which leaves no tree to choose.")
    return replace(search, depths=depths)


def tunable(manifest: Manifest, name: str | None) -> GraphDrafter:
    """The drafter of this name, or the first that has a tree. Raises `RequestError`."""
    trees = [d for d in manifest.drafters if isinstance(d, GraphDrafter)]
    found = next((d for d in trees if name in (None, d.name)), None)
    if found is None:
        has = ", ".join(f"{d.name} ({d.kind})" for d in manifest.drafters) or "no drafters"
        asked = "" if name is None else f" {name!r}"
        raise RequestError(f"The plan has no drafter{asked} with a tree (kinds eagle3, block and model); it has {has}.")
    return found


class _Bench:
    """Builds plans of many trees, and runs them on the prompts."""

    def __init__(
        self, origin: Origin, search: Search, texts: list[str], runs: Runs, context: int, progress: Progress
    ) -> None:
        self._origin, self._texts, self.new_tokens, self._nodes = origin, texts, runs.new_tokens, search.nodes
        self._temperature = runs.temperature
        self._longest = context - runs.new_tokens - 1
        wide, shallow = len(search.top_ks), 1 + (len(search.depths) - 2) * len(search.top_ks)
        timed = (2 + search.finalists) * _RACES
        self._total = 3 + (wide + timed) * len(texts) + shallow * min(len(texts), _COST_PROMPTS)
        self._progress, self._done = progress, 0

    def begin(self, text: str) -> None:
        """Say what begins; called once for each of about `_total` pieces of work."""
        self._progress(min(self._done, self._total), self._total, text)
        self._done += 1

    def load(self, trees: Sequence[Tree], folder: Path) -> Runtime:
        self.begin(f"building a plan of {len(trees)} trees")
        build(self._origin.recipe(trees, self._nodes), self._origin.path, folder)
        return Runtime.load(folder, verify=False)

    def prompts(self, runtime: Runtime) -> list[list[int]]:
        return [runtime.tokenizer.encode(text)[-self._longest :] for text in self._texts]

    def run(self, session: Session, ids: list[int], drafter: str) -> Generation:
        session.reset()
        return session.generate(ids, **self.options(drafter, self.new_tokens))

    def rounds(self, session: Session, ids: list[int], drafter: str, watch: Watcher | None = None) -> Generation:
        """The rounds after the first few, which take in the prompt."""
        session.reset()
        session.generate(ids, **self.options(drafter, _OPENING))
        return session.generate(**self.options(drafter, self.new_tokens - _OPENING, watch))

    def options(self, drafter: str, tokens: int, watch: Watcher | None = None) -> Options:
        return Options(
            drafter=drafter,
            max_new_tokens=tokens,
            temperature=self._temperature,
            on_round=watch,
            ignore_eos=True,
            auto_disable=False,
        )


def _estimate(found: Tuning, bench: _Bench, search: Search) -> None:
    """Fill all of `found` but `timed`."""
    widest, deepest = search.top_ks[-1], search.depths[-1]
    wide = [Tree(top_k=k, depth=deepest, nodes=largest(k, deepest, _RECORDED)) for k in search.top_ks]
    inner = search.depths[1:-1]
    shallow = [Tree(top_k=k, depth=d, nodes=d + 2 if k == 1 else 2) for d in inner for k in search.top_ks]
    shallow.append(Tree(top_k=widest, depth=0, nodes=2))  # without levels, every top_k costs the same
    with TemporaryDirectory(prefix="outrider-tune-") as folder:
        runtime = bench.load([*wide, *shallow], Path(folder) / "plan")
        session, prompts = runtime.session(), bench.prompts(runtime)
        costs = {}
        recorded: dict[int, list[DraftedTree]] = {}
        for tree in wide:
            recorded[tree.top_k], costs[tree] = _record(bench, session, prompts, tree)
        gaps: list[float] = []
        for tree in shallow:
            costs[tree] = _time(bench, session, prompts[:_COST_PROMPTS], tree, gaps)
        plain = [bench.rounds(session, ids, _PLAIN).stats for ids in prompts[:_COST_PROMPTS]]
        found.plain_round_ms = median(stats.total_ms / stats.rounds for stats in plain)
        bench.begin("timing the target by nodes")
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        found.context = len(middle) + bench.new_tokens // 2
        found.plain_ms, found.verify_ms = _verify_costs(bench, session, middle, search.nodes)
    found.host_ms = median(gaps)
    for k in search.top_ks:
        known = {tree.depth: ms for tree, ms in costs.items() if k == tree.top_k or not tree.depth}
        depths = sorted(known)
        found.draft_ms[k] = np.interp(range(deepest + 1), depths, [known[d] for d in depths]).tolist()
    found.acceptance_by_depth = acceptance_by_depth(recorded[widest])
    found.acceptance_by_rank = acceptance_by_rank(recorded[widest])
    shapes = [(k, d) for k in search.top_ks for d in range(deepest + 1) if k > 1 or d + 2 <= search.nodes]
    estimates = (_best_nodes(found, recorded[k], k, d) for k, d in shapes)
    found.estimates = sorted(estimates, key=lambda e: -e.tokens_per_second)


def _time(bench: _Bench, session: Session, prompts: list[list[int]], tree: Tree, gaps: list[float]) -> float:
    """The drafter's milliseconds a round; what no stage accounts for is added to `gaps`."""
    name, spent = name_of(tree), []
    for ids in prompts:
        bench.begin(f"timing {name}")
        stats = bench.rounds(session, ids, name).stats
        spent.append(stats.stage_ms[name] / stats.rounds)
        gaps.append((stats.total_ms - sum(stats.stage_ms.values())) / stats.rounds)
    return median(spent)


def _record(bench: _Bench, session: Session, prompts: list[list[int]], tree: Tree) -> tuple[list[DraftedTree], float]:
    """The tree of every round, and the drafter's milliseconds a round."""
    name, trees, spent = name_of(tree), list[DraftedTree](), []
    for ids in prompts:
        bench.begin(f"recording {name}")
        seen: list[RoundTrace] = []
        stats = bench.rounds(session, ids, name, seen.append).stats
        spent.append(stats.stage_ms[name] / stats.rounds)
        trees += [_drafted(r) for r in seen[:-1] if r.nodes]  # the last was cut at the limit
    return trees, median(spent)


def _drafted(seen: RoundTrace) -> DraftedTree:
    score, children, ranks = [0.0], [0] * (len(seen.nodes) + 1), []
    for node in seen.nodes:
        probability = max(node.probability or 0.0, np.finfo(np.float64).tiny)
        score.append(score[node.parent] + float(np.log(probability)))
        if node.accepted:
            ranks.append(children[node.parent])
        children[node.parent] += 1
    return DraftedTree(
        score=np.array(score[1:]),
        depth=np.array([node.depth for node in seen.nodes]),
        path=tuple(index for index, node in enumerate(seen.nodes) if node.accepted),
        ranks=tuple(ranks),
    )


def _verify_costs(bench: _Bench, session: Session, ids: list[int], most: int) -> tuple[float, list[float]]:
    """Milliseconds of a plain pass, and of passes that verify a chain of 1, 2 ... `most` nodes, tip included.

    They run after `ids` and half of the new tokens; nothing of them is committed.
    """
    session.reset()
    session.generate(ids, **bench.options(_PLAIN, bench.new_tokens // 2))
    chain = np.resize(session.token_ids, most).tolist()
    spent: NDArray[np.float64] = np.zeros((1 + _VERIFY_REPEATS, 1 + most))
    for row in spent:
        row[0] = session.time_round([], _PLAIN)
        for nodes in range(1, 1 + most):
            row[nodes] = session.time_round(chain[: nodes - 1], _PROBE)
    session.reset()
    plain_ms, *verify_ms = np.median(spent[1:], axis=0).tolist()  # the first row warmed up
    return plain_ms, verify_ms


def _best_nodes(found: Tuning, trees: list[DraftedTree], top_k: int, depth: int) -> Estimate:
    """The tree of this top_k and depth with the number of nodes that should be fastest."""
    most = largest(top_k, depth, len(found.verify_ms))
    tokens = tokens_per_verify(trees, depth, most).tolist()

    def estimate(nodes: int) -> Estimate:
        ms = found.verify_ms[nodes - 1] + found.draft_ms[top_k][depth] + found.host_ms
        return Estimate(top_k, depth, nodes, tokens[nodes], ms, 1000 * tokens[nodes] / ms)

    chain = top_k == 1  # of which none is verified in part
    return max(map(estimate, range(most if chain else 2, most + 1)), key=lambda e: e.tokens_per_second)


def _race(found: Tuning, bench: _Bench, search: Search, current: Tree) -> None:
    """Fill `found.timed`."""
    trees = [estimate.tree for estimate in found.estimates[: search.finalists]]
    trees += [] if current in trees else [current]
    with TemporaryDirectory(prefix="outrider-tune-") as folder:
        runtime = bench.load(trees, Path(folder) / "plan")
        session, prompts = runtime.session(), bench.prompts(runtime)
        modes = [_PLAIN, *map(name_of, trees)]
        begin = within("racing", bench.begin)
        runs = run_in_turn(modes, prompts, _RACES, lambda mode, ids, _: bench.run(session, ids, mode), begin=begin)
    timed = [_timed(tree, tree == current, runs[name_of(tree)], runs[_PLAIN]) for tree in trees]
    found.timed = sorted(timed, key=lambda t: -t.speedup)


def _timed(tree: Tree, current: bool, runs: list[Generation], plain: list[Generation]) -> Timed:
    stats = [run.stats for run in runs]
    return Timed(
        **tree.model_dump(),
        current=current,
        speedup=median(p.stats.total_ms / s.total_ms for s, p in zip(stats, plain, strict=True)),
        tokens_per_verify=sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats),
        tokens_per_second=median(1000 * s.new_tokens / s.total_ms for s in stats),
        same_tokens=all(run.token_ids == p.token_ids for run, p in zip(runs, plain, strict=True)),
    )
