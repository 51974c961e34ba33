"""Choosing a tree: what a recorded one says of smaller ones, and, on the toy plan, that the best measured is chosen."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.compiler.recipe_drafters import BlockSection, ModelSection
from outrider.plans import names
from outrider.plans.host_drafters import NgramDrafter
from outrider.plans.manifest import Tree
from outrider.plans.pass_prices import read_pass_prices
from outrider.runtime.trace import Node, RoundTrace
from outrider.tools.tune import __main__ as command
from outrider.tools.tune import prices
from outrider.tools.tune import search as tune
from outrider.tools.tune.replay import DraftedTree, acceptance_by_depth, acceptance_by_rank, largest, tokens_per_verify
from outrider.tools.tune.search import Search
from outrider.tools.tune.table import Estimate, Timed, Tuning, print_tuning
from tests.compiler.test_draft_graph import grow

SMALL = Search(top_ks=(1, 2), depths=(0, 1), nodes=4, finalists=1)
SHALLOW_RECIPE = """\
name: shallow
target: {checkpoint: target}
drafters:
  - {name: chain, kind: model, checkpoint: target, gamma: 2}
capacity: {context: 160, prefill_chunk: 16}
held_out: held_out.jsonl
"""


@pytest.fixture(scope="module")
def shallow_plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the toy's first layer, which drafts for itself: its trees are exported quickly."""
    folder = tmp_path_factory.mktemp("shallow")
    checkpoint = shutil.copytree(toy_recipe.parent / "target", folder / "target")
    settings = Qwen3Config.from_pretrained(checkpoint, num_hidden_layers=1, layer_types=["full_attention"])
    Qwen3ForCausalLM.from_pretrained(checkpoint, config=settings).save_pretrained(checkpoint)
    recipe = folder / "model.yaml"
    recipe.write_text(SHALLOW_RECIPE, encoding="utf-8")
    shutil.copyfile(toy_recipe.parent / "held_out.jsonl", folder / "held_out.jsonl")
    build(load_recipe(recipe), recipe, folder / "plan")
    return folder / "plan"


def table() -> Tuning:
    """A finished choice."""
    return Tuning(
        "plan", "0" * 64, "bushy", 2, 32, 0.0, 40, 1.0, 1.25, 0.25,
        [1.0, 1.5, 2.0, 2.5], {1: [0.5, 1.0], 2: [0.5, 1.5]}, [0.75, 0.25], [0.9, 0.1],
        [Estimate(2, 1, 4, 2.0, 4.0, 500.0), Estimate(1, 1, 3, 1.8, 4.0, 450.0)],
        [Timed(2, 1, 4, False, 1.4, 2.1, 520.0, True), Timed(1, 3, 5, True, 1.2, 1.9, 440.0, False)],
    )  # fmt: skip


def test_the_command_measures_chooses_and_writes(
    shallow_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[..., Any]
) -> None:
    monkeypatch.setattr(tune, "Search", lambda: SMALL)
    out = tmp_path / "tuned.yaml"
    found = report(command.main, shallow_plan, "--new", 16, "--count", 2, "--out", out)
    assert found.keys() == table().to_json().keys() | {"recipe", "png", "prices"}
    assert found["prices"] == str(shallow_plan / "prices.json")
    assert Runtime.load(shallow_plan).loaded.prices is not None  # of a tuned plan, as a user loads it
    assert (found["drafter"], found["prompts"], found["new_tokens"]) == ("chain", 2, 16)
    assert [entry["nodes"] for entry in found["verify_ms"]] == [1, 2, 3, 4]
    assert [(entry["top_k"], entry["depth"]) for entry in found["draft_ms"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(entry["ms"] > 0 for entry in found["verify_ms"] + found["draft_ms"])
    rates = [estimate["tokens_per_second"] for estimate in found["estimates"]]
    assert rates == sorted(rates, reverse=True)
    shape = ("top_k", "depth", "nodes")
    raced = [tuple(timed[key] for key in shape) for timed in found["timed"]]
    assert tuple(found["estimates"][0][key] for key in shape) in raced
    assert [raced[i] for i, timed in enumerate(found["timed"]) if timed["current"]] == [(1, 1, 3)]
    assert all(timed["same_tokens"] for timed in found["timed"])
    best = max(found["timed"], key=lambda timed: timed["speedup"])
    assert (found["chosen"], found["pays"]) == ({key: best[key] for key in shape}, best["speedup"] > 1)

    assert found["recipe"] == str(out)
    written = next(d for d in load_recipe(out).drafters if d.name == "chain")
    assert isinstance(written, ModelSection)
    if written.gamma is None:
        assert not isinstance(written.tree, str | None)
        assert written.tree.tree() == Tree(**found["chosen"])
    else:
        assert Tree(top_k=1, depth=written.gamma - 1, nodes=written.gamma + 1) == Tree(**found["chosen"])
    assert Path(found["png"]).read_bytes().startswith(b"\x89PNG")


def test_prices_alone_are_measured_written_and_used(
    workplace: Path, toy: Runtime, monkeypatch: pytest.MonkeyPatch, output: Callable[..., str]
) -> None:
    monkeypatch.setattr(prices, "_SECONDS", 0.0)
    plan = workplace / "plan"
    file = plan / "prices.json"
    file.write_text("[]")  # which holds no prices: measuring again repairs it
    asked = (command.main, plan, "--prices", "--threads", 1)
    found = json.loads(output(*asked, "--context", 100, "--json"))
    assert (found.pop("file"), found["identity"]) == (str(file), toy.manifest.identity)
    assert (found["backend"], found["threads"], found["context"]) == ("onnxruntime-cpu", 1, 100)
    assert [entry["rows"] for entry in found["prices"]] == prices.sizes(toy.session().limits[names.LOGITS])
    assert all(entry["ms"] > 0 for entry in found["prices"])
    kept = read_pass_prices(plan)
    assert kept is not None
    assert kept.model_dump(mode="json") == found
    assert Runtime.load(plan, threads=1).loaded.prices is not None
    assert Runtime.load(plan, threads=2).loaded.prices is None  # measured with others
    text = output(*asked, "--context", 100)
    assert "milliseconds of a pass of the target after 100 tokens" in text
    assert f"wrote {file}" in text
    file.unlink()
    said = output(*asked, "--context", 159, status=2)
    assert "context is 159; pass 1 to 158 tokens: the plan's context is 160" in said
    assert not file.exists()


def test_the_table_says_when_nothing_pays(capsys: pytest.CaptureFixture[str]) -> None:
    slow = table()
    slow.timed = [Timed(2, 1, 4, True, 0.9, 2.1, 520.0, True)]
    print_tuning(slow, Console(file=sys.stdout, width=120))
    assert "No tree of bushy pays here: plain decoding is faster." in capsys.readouterr().out
    assert slow.to_json()["pays"] is False


def test_sizes_are_closer_where_drafts_end_and_depths_end_with_a_block(toy_recipe: Path) -> None:
    assert prices.sizes(1) == [1]
    assert prices.sizes(35) == [*range(1, 16), *range(16, 32, 2), 32, 35]
    assert len(prices.sizes(1000)) < 100
    recipe = load_recipe(toy_recipe)
    section = next(d for d in recipe.drafters if isinstance(d, BlockSection))
    assert tune._within_block(Search(), recipe, section).depths == (0, 2, 4)


@pytest.mark.parametrize("drafter", ["chain", "bushy", "head"])
def test_a_recording_replays_what_happened(toy: Runtime, drafter: str) -> None:
    tree = next(d.tree for d in toy.manifest.drafters if d.name == drafter and not isinstance(d, NgramDrafter))
    rounds: list[RoundTrace] = []
    toy.generate(
        "def f(", drafter=drafter, max_new_tokens=60, ignore_eos=True, auto_disable=False, on_round=rounds.append
    )
    drafted = [r for r in rounds[:-1] if r.nodes]  # the last one is cut at the limit
    trees = [tune._drafted(r) for r in drafted]
    expected = np.mean([len(r.committed) for r in drafted])
    assert tokens_per_verify(trees, tree.depth, tree.nodes)[tree.nodes] == pytest.approx(expected)
    assert all(len(t.ranks) == len(t.path) for t in trees)
    assert max(max(t.ranks, default=0) for t in trees) < tree.top_k


def test_timing_the_target_leaves_the_session_empty(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session = toy.session()
    expected = session.generate("import os\n", drafter="none", max_new_tokens=20, ignore_eos=True)
    monkeypatch.setattr(tune, "_PROBE", "ngram")
    bench = tune._Bench(cast(Any, None), SMALL, [], tune.Runs(new_tokens=16), 160, lambda *_: None)
    plain, verify = tune._verify_costs(bench, session, toy.tokenizer.encode("x = 1\n"), 5)
    assert plain > 0
    assert (len(verify), session.token_ids) == (5, [])
    again = session.generate("import os\n", drafter="none", max_new_tokens=20, ignore_eos=True)
    assert again.token_ids == expected.token_ids


def test_the_number_of_nodes_is_the_one_that_costs_least_a_token() -> None:
    found = table()
    found.verify_ms = [1.0, 1.0, 1.0, 9.0]
    nodes = [{"probability": p, "parent": 0, "depth": 1, "accepted": a} for p, a in ((0.5, 0), (0.3, 0), (0.2, 1))]
    seen = [tune._drafted(RoundTrace(5, [Node(token_id=1, **n) for n in nodes], [7, 8]))]
    free = tune._best_nodes(found, seen, top_k=2, depth=0)
    assert (free.nodes, free.tokens_per_verify) == (2, 1.0)  # the third child would be accepted, and is not in the tree
    found.draft_ms[3] = [0.5]
    wide = tune._best_nodes(found, seen, top_k=3, depth=0)
    assert (wide.nodes, wide.tokens_per_verify) == (2, 1.0)  # one more token is not worth the fourth node's 8 ms
    found.verify_ms[3] = 1.0
    wide = tune._best_nodes(found, seen, top_k=3, depth=0)
    assert (wide.nodes, wide.tokens_per_verify, wide.round_ms) == (4, 2.0, pytest.approx(1.0 + 0.5 + 0.25))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--drafter", "short"],
            "no drafter 'short' with a tree (kinds eagle3, block and model); it has ngram (ngram)",
        ),
        (["--new", "31"], "from 32 to 158 new tokens"),
        (["--new", "159"], "context is 160"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        ([], "names no held_out prompts; pass --prompts FILE"),
        (["--out", "nowhere/copy.yaml"], "nowhere/copy.yaml cannot be written"),
        (["--out", "RECIPE"], "is the recipe itself"),
        (["--set", "drafters=[]"], "was built from another recipe"),
        (["--set", "capacity.context=200"], "capacity.context is 160 in the plan and 200 in the recipe"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    toy_plan: Path, output: Callable[..., str], arguments: list[str], said: str
) -> None:
    recipe = str(toy_plan.parent / "model.yaml")
    words = (recipe if word == "RECIPE" else word for word in arguments)
    assert said in output(command.main, toy_plan, *words, status=2)


VOCABULARY = 9
Nodes = list[tuple[int, int, int, float, int]]  # token, parent node, depth, score, row


def log_probs(seed: int, scale: float, path: list[int]) -> NDArray[np.float64]:
    logits = np.random.default_rng([seed, *path]).normal(size=VOCABULARY) * scale
    return logits - np.log(np.exp(logits).sum())


def accepted(nodes: Nodes, chosen: list[int]) -> list[int]:
    """Nodes, 1 for the first after the tip, along what the target chooses."""
    path, at = [], 0
    for token in chosen:
        at = next((i for i, (t, parent, *_) in enumerate(nodes, start=1) if parent == at and t == token), 0)
        if not at:
            break
        path.append(at)
    return path


def recorded(nodes: Nodes, chosen: list[int]) -> DraftedTree:
    path = tuple(node - 1 for node in accepted(nodes, chosen))
    siblings = [[i for i, n in enumerate(nodes) if n[1] == nodes[node][1]] for node in path]
    return DraftedTree(
        score=np.array([score for *_, score, _ in nodes]),
        depth=np.array([depth for _, _, depth, _, _ in nodes]),
        path=path,
        ranks=tuple(found.index(node) for found, node in zip(siblings, path, strict=True)),
    )


@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(1, 4),
    deepest=st.integers(0, 4),
    scale=st.sampled_from([0.0, 0.5, 2.0]),
    chosen=st.lists(st.integers(0, VOCABULARY - 1), min_size=6, max_size=6),
    follow=st.integers(0, 6),
)
def test_a_whole_tree_replays_every_smaller_one_exactly(seed, top_k, deepest, scale, chosen, follow) -> None:
    def drafter(path: list[int]) -> NDArray[np.float64]:
        return log_probs(seed, scale, path)

    for i in range(follow):  # a target that mostly agrees, so that paths are long
        chosen[i] = int(np.argmax(drafter(chosen[:i])))
    whole = recorded(grow(drafter, Tree(top_k=top_k, depth=deepest, nodes=largest(top_k, deepest, 999))), chosen)
    for depth in range(deepest + 1):
        most = largest(top_k, depth, 24)
        promised = tokens_per_verify([whole], depth, most)
        for nodes in range(2, most + 1):
            small = grow(drafter, Tree(top_k=top_k, depth=depth, nodes=nodes))
            assert promised[nodes] == 1 + len(accepted(small, chosen))


@given(seed=st.integers(0, 2**31))
def test_a_recording_that_kept_few_nodes_promises_no_more_than_a_whole_one(seed: int) -> None:
    chosen = [0, 1, 2, 3]
    for i in range(4):
        chosen[i] = int(np.argsort(-log_probs(seed, 1.0, chosen[:i]))[(seed >> i) % 3])
    grown = (grow(lambda path: log_probs(seed, 1.0, path), Tree(top_k=3, depth=3, nodes=nodes)) for nodes in (31, 16))
    whole, few = (recorded(tree, chosen) for tree in grown)
    for depth in range(4):
        exact, least = (tokens_per_verify([tree], depth, 10) for tree in (whole, few))
        assert (least <= exact).all()
    np.testing.assert_array_equal(tokens_per_verify([few], 3, 16), tokens_per_verify([whole], 3, 16))


def test_acceptance_is_counted_by_depth_and_by_rank() -> None:
    shape = {"score": np.log([0.5, 0.3, 0.4, 0.1]), "depth": np.array([1, 1, 2, 2])}
    trees = [
        DraftedTree(**shape, path=(0, 2), ranks=(0, 0)),
        DraftedTree(**shape, path=(1,), ranks=(1,)),
        DraftedTree(**shape, path=(0, 3), ranks=(0, 1)),
        DraftedTree(**shape, path=(), ranks=()),
    ]
    assert acceptance_by_depth(trees) == [0.75, 0.5]
    assert acceptance_by_rank(trees) == [pytest.approx(0.6), pytest.approx(0.4)]
    assert tokens_per_verify(trees, 1, 5).tolist() == [1, 1, 1.5, 1.75, 2.0, 2.25]
    assert tokens_per_verify(trees, 0, 3).tolist() == [1, 1, 1.5, 1.75]
    assert acceptance_by_depth([]) == acceptance_by_rank([]) == []
