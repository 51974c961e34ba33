"""Choose a drafter's tree for this machine: what a tree costs, what it would have accepted, and a race of the best.

Everything is measured on plans that are built for the purpose, from the recipe of the plan that is tuned:

1. One plan that holds the drafter several times, with trees of several `top_k` and depths. Its rounds on held-out
   prompts tell the drafter's cost, which between measured depths is interpolated: every level does the same work.
   The deepest tree of each `top_k` keeps many nodes and is recorded: `replay` says what smaller ones had accepted.
2. On the same plan, the cost of verifying 1, 2, 3 ... nodes: the target's part of a speculative round, on chains,
   behind as many tokens as the prompts and half of what is generated make.
3. A plan with the best few by (tokens per verify) / (verify + draft + host time), and with the tree that the plan has
   now. Plain decoding and they run alternately, and the wall clock decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from compiler.build import build
from compiler.held_out import read_prompts
from compiler.recipe import GraphSection, NgramSection, Recipe, load_recipe
from compiler.replay import DraftedTree, acceptance_by_depth, acceptance_by_rank, largest, tokens_per_verify
from compiler.verify import check_same_source
from plans import names
from plans.errors import RecipeError, RequestError
from plans.manifest import GraphDrafter, Manifest, Tree
from plans.plan import read_manifest
from runtime import Generation, Runtime, Session
from runtime.request import Options
from runtime.trace import Round

Progress = Callable[[int, int, str], None]

_OPENING = 4  # tokens that take in the prompt, before rounds are timed
_RECORDED = 64  # nodes of a recorded tree: 4 times what it stands for
_VERIFY_REPEATS = 15
_COST_PROMPTS = 4
_RACES = 2  # runs of each prompt and tree
_PROBE = "probe"  # an n-gram drafter that never drafts: its program verifies what it is given
_PLAIN = "none"


@dataclass(frozen=True)
class Search:
    """Trees to choose among: every depth up to the last of `depths`, where the drafter's cost is measured; every
    number of nodes up to `nodes`. The best `finalists` by estimate are timed."""

    top_ks: tuple[int, ...] = (1, 2, 3, 4)
    depths: tuple[int, ...] = (0, 2, 6)
    nodes: int = 16
    finalists: int = 3

    @property
    def deepest(self) -> int:
        return self.depths[-1]


@dataclass(frozen=True)
class Estimate:
    """What one tree should give. `round_ms` is verify, draft and host together."""

    top_k: int
    depth: int
    nodes: int
    tokens_per_verify: float
    round_ms: float
    tokens_per_second: float

    @property
    def tree(self) -> Tree:
        return Tree(top_k=self.top_k, depth=self.depth, nodes=self.nodes)


@dataclass(frozen=True)
class Timed:
    """What one tree gave, prompt included; `current`: it is the plan's own. Medians, the speedup that of pairs."""

    top_k: int
    depth: int
    nodes: int
    current: bool
    speedup: float
    tokens_per_verify: float
    tokens_per_second: float
    same_tokens: bool

    @property
    def tree(self) -> Tree:
        return Tree(top_k=self.top_k, depth=self.depth, nodes=self.nodes)


@dataclass
class Tuning:
    """The table behind a choice. `verify_ms[i]` is for i + 1 nodes; `draft_ms` by top_k, then depth; `estimates` holds
    the best number of nodes of each top_k and depth, best first; `timed` what was built and raced, best first.

    `plain_ms` is one plain decoding pass; `host_ms` what the host adds to a round. Acceptance is that of the recorded
    trees of the largest top_k: by depth, the share of rounds that accepted more; by rank, of accepted nodes among
    their siblings.
    """

    plan: str
    identity: str
    drafter: str
    prompts: int
    new_tokens: int
    context: int = 0
    plain_ms: float = 0.0
    host_ms: float = 0.0
    verify_ms: list[float] = field(default_factory=list)
    draft_ms: dict[int, list[float]] = field(default_factory=dict)
    acceptance_by_depth: list[float] = field(default_factory=list)
    acceptance_by_rank: list[float] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)

    @property
    def chosen(self) -> Timed:
        return self.timed[0]

    @property
    def plain_tokens_per_second(self) -> float:
        """Of the same cost model as the estimates."""
        return 1000 / (self.plain_ms + self.host_ms)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "chosen": self.chosen.tree.model_dump(),
            "pays": self.chosen.speedup > 1,
        }


def tune_plan(
    recipe: Recipe,
    recipe_path: Path,
    plan: Path,
    *,
    drafter: str | None = None,
    prompts: Path | None = None,
    count: int = 8,
    new_tokens: int = 128,
    overrides: Sequence[str] = (),
    search: Search | None = None,
    progress: Progress = lambda *_: None,
) -> Tuning:
    """Choose the tree of `drafter` (default: the plan's first that has one) on `count` prompts (default: held-out).

    `recipe` was read from `recipe_path` with `overrides`. Raises `RequestError`, `RecipeError` and `PlanError` for what
    cannot be tuned.
    """
    manifest = read_manifest(plan)
    settings = _drafter(manifest, drafter)
    section = next(d for d in recipe.drafters if d.name == settings.name) if settings else None
    check_same_source(recipe, plan, manifest)
    assert section is not None
    assert not isinstance(section, NgramSection)
    longest = manifest.target.context - new_tokens - 1
    if count < 1 or new_tokens < 4 * _OPENING or longest < 1:
        raise RequestError(
            f"count is {count} and new is {new_tokens}; tune needs at least 1 prompt and {4 * _OPENING} tokens, and a "
            f"prompt beside them in the plan's context of {manifest.target.context}."
        )
    texts = _prompts(recipe, prompts)[:count]
    found = Tuning(str(plan), manifest.identity, settings.name, len(texts), new_tokens)
    search = search or Search()
    known = manifest.models[settings.name].vocab_size
    search = Search(tuple(k for k in search.top_ks if k <= known), search.depths, search.nodes, search.finalists)
    bench = _Bench(recipe_path, overrides, section, texts, longest, new_tokens, search, progress)
    _estimate(found, bench, search)
    _race(found, bench, search, settings.tree)
    return found


def _drafter(manifest: Manifest, name: str | None) -> GraphDrafter:
    trees = [d for d in manifest.drafters if isinstance(d, GraphDrafter)]
    has = ", ".join(f"{d.name} ({d.kind})" for d in manifest.drafters) or "none"
    if not trees:
        raise RequestError(f"The plan has no drafter with a tree to tune (kinds eagle3 and model); it has {has}.")
    chosen = next((d for d in trees if name in (None, d.name)), None)
    if chosen is None:
        raise RequestError(f"The plan has no drafter {name!r} with a tree (kinds eagle3 and model); it has {has}.")
    return chosen


def _prompts(recipe: Recipe, path: Path | None) -> list[str]:
    path = path or recipe.held_out_path
    if path is None:
        raise RequestError('The recipe names no held_out prompts; pass --prompts FILE of {"prompt": ...} lines.')
    return read_prompts(path)


class _Bench:
    """Builds plans with many trees of one drafter, and runs them on the prompts."""

    def __init__(
        self,
        recipe_path: Path,
        overrides: Sequence[str],
        section: GraphSection,
        prompts: list[str],
        longest: int,
        new_tokens: int,
        search: Search,
        progress: Progress,
    ) -> None:
        self._recipe_path, self._overrides, self._section = recipe_path, overrides, section
        self.prompts, self._longest, self._new = prompts, longest, new_tokens
        runs = len(search.top_ks) * len(prompts) + (2 + len(search.top_ks)) * min(len(prompts), _COST_PROMPTS)
        self._total = runs + 3 + (2 + search.finalists) * len(prompts) * _RACES
        self._progress, self._done = progress, 0

    def step(self, text: str) -> None:
        self._progress(self._done, self._total, text)
        self._done += 1

    def load(self, trees: Sequence[Tree], folder: Path) -> Runtime:
        """A plan in `folder` with the drafter once for each tree, under `name_of` it, and the probe."""
        shared = self._section.model_dump(mode="json", exclude_none=True, exclude={"gamma", "tree", "name"})
        listed: list[dict[str, object]] = [
            {**shared, "name": name_of(tree), "tree": tree.model_dump()} for tree in trees
        ]
        listed.append({"name": _PROBE, "kind": "ngram", "max_draft": max(t.nodes for t in trees) - 1})
        text = json.dumps(listed, ensure_ascii=False)
        recipe = load_recipe(self._recipe_path, [*self._overrides, f"drafters={text}"])
        self.step(f"building a plan of {len(trees)} trees")
        build(recipe, self._recipe_path, folder)
        return Runtime.load(folder)

    def ids(self, runtime: Runtime, prompt: str) -> list[int]:
        return runtime.tokenizer.encode(prompt)[-self._longest :]

    def run(self, session: Session, ids: list[int], drafter: str, **options: object) -> tuple[Generation, Generation]:
        """The opening of a generation, which takes the prompt in, and the rest."""
        session.reset()
        shared = Options(drafter=drafter, ignore_eos=True, auto_disable=False)
        first = session.generate(ids, **(shared | Options(max_new_tokens=_OPENING)))
        rest = shared | Options(max_new_tokens=self._new - _OPENING) | options
        return first, session.generate("", **rest)  # type: ignore[typeddict-item]


def name_of(tree: Tree) -> str:
    return f"k{tree.top_k}-d{tree.depth}-n{tree.nodes}"


def _estimate(found: Tuning, bench: _Bench, search: Search) -> None:
    """Fill everything of `found` but `timed`."""
    deepest = search.deepest
    wide = {k: Tree(top_k=k, depth=deepest, nodes=largest(k, deepest, _RECORDED)) for k in search.top_ks}
    shallow = [
        Tree(top_k=k, depth=d, nodes=2) for d in search.depths[:-1] for k in search.top_ks if d or k == search.top_ks[-1]
    ]  # without levels, top_k is not worth a measurement
    with TemporaryDirectory(prefix="outrider-tune-") as folder:
        runtime = bench.load([*wide.values(), *shallow], Path(folder) / "plan")
        session = runtime.session()
        prompts = [bench.ids(runtime, prompt) for prompt in bench.prompts]
        costs: dict[tuple[int, int], float] = {}
        gaps: list[float] = []
        for tree in shallow:
            spent = []
            for ids in prompts[:_COST_PROMPTS]:
                bench.step(f"timing {name_of(tree)}")
                stats = bench.run(session, ids, name_of(tree))[1].stats
                spent.append(stats.stage_ms[name_of(tree)] / stats.rounds)
                gaps.append((stats.total_ms - sum(stats.stage_ms.values())) / stats.rounds)
            costs[tree.top_k, tree.depth] = median(spent)
        recorded = {}
        for k, tree in wide.items():
            recorded[k], costs[k, deepest] = _record(bench, session, prompts, tree)
        found.host_ms = median(gaps)
        context = int(median(len(ids) for ids in prompts)) + found.new_tokens // 2
        found.context = context
        bench.step("timing the target by nodes")
        ids = (max(prompts, key=len) * (context // max(map(len, prompts)) + 1))[:context]
        found.plain_ms, found.verify_ms = _verify_costs(session, ids, search.nodes)
    root_only = costs[search.top_ks[-1], 0] if search.depths[0] == 0 else None
    for k in search.top_ks:
        known = {d: costs.get((k, d), root_only) for d in search.depths}
        ms = np.interp(range(deepest + 1), list(known), [c for c in known.values() if c is not None])
        found.draft_ms[k] = [float(value) for value in ms]
    widest = recorded[search.top_ks[-1]]
    found.acceptance_by_depth, found.acceptance_by_rank = acceptance_by_depth(widest), acceptance_by_rank(widest)
    found.estimates = sorted(
        (_best_of(found, k, d, tokens_per_verify(recorded[k], d, search.nodes)) for k in wide for d in range(deepest + 1)),
        key=lambda e: -e.tokens_per_second,
    )


def _record(
    bench: _Bench, session: Session, prompts: list[list[int]], tree: Tree
) -> tuple[list[DraftedTree], float]:
    """Every round's tree, and the drafter's milliseconds a round."""
    name, trees, spent = name_of(tree), list[DraftedTree](), []
    for ids in prompts:
        bench.step(f"recording {name}")
        rounds: list[Round] = []
        stats = bench.run(session, ids, name, on_round=rounds.append)[1].stats
        spent.append(stats.stage_ms[name] / stats.rounds)
        trees += [_drafted(r) for r in rounds[:-1] if r.nodes]  # the last was cut at the limit
    return trees, median(spent)


def _drafted(seen: Round) -> DraftedTree:
    score = [0.0]
    ranks: list[int] = []
    children = [0] * (len(seen.nodes) + 1)
    for node in seen.nodes:
        score.append(score[node.parent] + float(np.log(max(node.probability or 0.0, 5e-324))))
        if node.accepted:
            ranks.append(children[node.parent])
        children[node.parent] += 1
    return DraftedTree(
        score=np.array(score[1:]),
        depth=np.array([node.depth for node in seen.nodes]),
        path=tuple(i for i, node in enumerate(seen.nodes) if node.accepted),
        ranks=tuple(ranks),
    )


def _verify_costs(session: Session, ids: list[int], most: int) -> tuple[float, list[float]]:
    """Milliseconds of a plain pass, and of a pass that verifies a chain of 1, 2 ... `most` nodes, behind `ids`.

    The session's sequence stays as it is: nothing of these passes is committed.
    """
    session.reset()
    session.generate(ids, drafter=_PLAIN, max_new_tokens=2)
    step, slots = session._step, session._slots
    plain, verify = (session._programs[name] for name in (names.DECODE, names.speculate(_PROBE)))
    tip, drafted = session.token_ids[-1:], (session.token_ids * most)[:most]

    def lay_out(nodes: int) -> None:
        step.begin_target(slots.length, slots.next_position(), tip, 0, logits=True)
        step.token_ids[1:nodes] = drafted[1:nodes]
        step.parent[1:nodes] = np.arange(nodes - 1)
        step.append_nodes(nodes - 1)

    spent: NDArray[np.float64] = np.zeros((_VERIFY_REPEATS + 1, most + 1))
    for repeat in range(_VERIFY_REPEATS + 1):
        for nodes in range(most + 1):
            lay_out(max(nodes, 1))
            started = perf_counter()
            (verify if nodes else plain).run()
            spent[repeat, nodes] = perf_counter() - started
    plain_ms, *verify_ms = np.median(spent[1:] * 1000, axis=0).tolist()  # the first warmed up
    session.reset()
    return plain_ms, verify_ms


def _best_of(found: Tuning, top_k: int, depth: int, tokens: NDArray[np.float64]) -> Estimate:
    """The best number of nodes for a top_k and a depth; `tokens` committed a round, by nodes."""

    def estimate(nodes: int) -> Estimate:
        ms = found.verify_ms[nodes - 1] + found.draft_ms[top_k][depth] + found.host_ms
        return Estimate(top_k, depth, nodes, float(tokens[nodes]), ms, 1000 * float(tokens[nodes]) / ms)

    shapes = range(2, largest(top_k, depth, len(found.verify_ms)) + 1)
    return max(map(estimate, shapes), key=lambda e: e.tokens_per_second)


def _race(found: Tuning, bench: _Bench, search: Search, current: Tree) -> None:
    """Fill `found.timed`."""
    trees = [e.tree for e in found.estimates[: search.finalists]]
    trees += [] if current in trees else [current]
    with TemporaryDirectory(prefix="outrider-tune-") as folder:
        runtime = bench.load(trees, Path(folder) / "plan")
        session = runtime.session()
        prompts = [bench.ids(runtime, prompt) for prompt in bench.prompts]
        modes = [_PLAIN, *map(name_of, trees)]
        for mode in modes:
            bench.run(session, prompts[0], mode)
        runs: dict[str, list[tuple[Generation, Generation]]] = {mode: [] for mode in modes}
        for _ in range(_RACES):
            for ids in prompts:
                for mode in modes:
                    bench.step(f"racing {mode}")
                    runs[mode].append(bench.run(session, ids, mode))
    plain = [(_ms(pair), _tokens(pair)) for pair in runs[_PLAIN]]
    for tree in trees:
        pairs = runs[name_of(tree)]
        found.timed.append(
            Timed(
                **tree.model_dump(),
                current=tree == current,
                speedup=median(ms / _ms(pair) for pair, (ms, _) in zip(pairs, plain, strict=True)),
                tokens_per_verify=sum(rest.stats.new_tokens for _, rest in pairs)
                / sum(rest.stats.rounds for _, rest in pairs),
                tokens_per_second=median(1000 * found.new_tokens / _ms(pair) for pair in pairs),
                same_tokens=all(_tokens(pair) == tokens for pair, (_, tokens) in zip(pairs, plain, strict=True)),
            )
        )
    found.timed.sort(key=lambda timed: -timed.speedup)


def _ms(pair: tuple[Generation, Generation]) -> float:
    return sum(generation.stats.total_ms for generation in pair)


def _tokens(pair: tuple[Generation, Generation]) -> list[int]:
    return [token for generation in pair for token in generation.token_ids]
