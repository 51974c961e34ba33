"""What is compared: drafters by name and kind, their drafts in other shapes, lengths of prompts, ways of sampling."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.compiler.recipe_drafters import reshaped
from outrider.plans.errors import RequestError
from outrider.plans.host_drafters import NgramDrafter
from outrider.plans.manifest import Drafter, GraphDrafter, Tree
from outrider.plans.pass_prices import PassPrices, Price, read_pass_prices, write_pass_prices
from outrider.plans.plan import read_manifest
from outrider.runtime.options.options import Options
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench.sampling import GREEDY, name_sampling, read_sampling
from outrider.tools.bench.shapes import Shape, choose_drafters, choose_shapes, read_depths, read_trees, within_block
from outrider.tools.bench.variants import plan_to_measure
from tests.conftest import TOY_DRAFTERS


@pytest.fixture(scope="module")
def drafters(toy_plan: Path) -> tuple[Drafter, ...]:
    return read_manifest(toy_plan).drafters


def test_drafters_are_chosen_by_name_or_kind(drafters: tuple[Drafter, ...]) -> None:
    wanted = {
        None: TOY_DRAFTERS,
        "model,none, eagle3": ["chain", "bushy", "head"],
        "bushy,model": ["bushy", "chain"],
        "ngram": ["ngram"],  # the name, and not all of the kind
        "none": [],
    }
    assert {each: [drafter.name for drafter in choose_drafters(drafters, each)] for each in wanted} == wanted
    with pytest.raises(RequestError, match=r"names 'medusa', but the plan has ngram \(ngram\), .* none; pass names or"):
        choose_drafters(drafters, "none,medusa")


def test_drafts_take_the_shapes_that_their_drafters_can(drafters: tuple[Drafter, ...]) -> None:
    def shapes(**asked: Any) -> dict[str, list[Shape]]:
        found = choose_shapes(drafters, asked.get("trees"), asked.get("depths"))
        return {drafter.name: of for drafter, of in found}

    own, other = Tree(top_k=4, depth=2, nodes=12), Tree(top_k=2, depth=1, nodes=5)
    found = shapes(trees=read_trees("2/1/5,own, 2/1/5"))
    assert found["head"] == [other, own]
    assert found["chain"] == [other, Tree(top_k=1, depth=3, nodes=5)]
    assert found["ngram"] == [6]
    found = shapes(depths=read_depths("1,own,8"))  # the longest path of every draft
    assert found["ngram"] == [1, 6, 8]
    assert found["chain"] == [Tree(top_k=1, depth=d - 1, nodes=d + 1) for d in (1, 4, 8)]
    assert found["bushy"] == [Tree(top_k=3, depth=0, nodes=4), *(Tree(top_k=3, depth=d, nodes=9) for d in (2, 7))]
    with pytest.raises(RequestError, match=r"of ngram \(ngram\), short \(ngram\) none does; .*--depth"):
        choose_shapes([d for d in drafters if d.name in ("ngram", "short")], read_trees("own"), None)
    rejecting = GraphDrafter(kind="model", name="it", tree=Tree(top_k=1, depth=1, nodes=3), acceptance="rejection")
    choose_shapes([rejecting], read_trees("own,1/3/5"), None)
    with pytest.raises(RequestError, match=r"it is accepted by rejection, .* 2/3/8 is none; pass such as 1/3/5"):
        choose_shapes([rejecting], read_trees("2/3/8"), None)


def test_a_draft_ends_with_its_block_and_n_grams_of_few_nodes_foresee_few() -> None:
    chain = [Tree(top_k=1, depth=d - 1, nodes=d + 1) for d in (1, 5)]
    assert within_block([*chain, Tree(top_k=1, depth=7, nodes=9)], 5) == chain
    wide = [Tree(top_k=2, depth=d, nodes=12) for d in (4, 8)]
    assert within_block(wide, 5) == wide[:1]
    assert within_block(wide, 1) == [Tree(top_k=2, depth=0, nodes=3)]
    section = NgramDrafter(name="mixed", kind="ngram", max_draft=6, otherwise="head", least=2)
    found = [NgramDrafter.model_validate(reshaped(section, "mixed.1", nodes)) for nodes in (1, 8)]
    assert [(each.name, each.max_draft, each.least) for each in found] == [("mixed.1", 1, 1), ("mixed.1", 8, 2)]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (read_trees, "own,2/-3/4", "'2/-3/4' is no tree; write TOP_K/DEPTH/NODES, such as 2/6/10, or own"),
        (read_trees, "2/1/9", "'2/1/9': has 9 nodes, but grows only 7; lower nodes"),
        (read_trees, "99/1/9", "'99/1/9': top_k Input should be less than or equal to 32"),
        (read_depths, "2,0", "'0' is neither a number from 1 to 64 nor own"),
        (read_sampling, "0.7", "'0.7' in '0.7' is none of temperature, top_k, top_p, min_p, top_n_sigma, seed; write"),
        (read_sampling, "temperature=warm", "temperature in 'temperature=warm' is 'warm', which is no number"),
        (read_sampling, "temperature=1,seed=1,seed=2", "'seed' in 'temperature=1,seed=1,seed=2' stands twice"),
        (read_sampling, "top_p=0.9", "'top_p=0.9' has no temperature above 0, and would be greedy"),
        (read_sampling, "temperature=1,top_p=1.5", "top_p is 1.5; pass a number above 0 and at most 1"),
    ],
)
def test_what_cannot_be_read_is_refused(read: Any, text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read(text)
    assert said in str(caught.value)


def test_sampling_is_named_as_it_is_written() -> None:
    assert read_sampling("greedy") == GREEDY
    for text in ("greedy", "temperature=0.7", "temperature=0.7,top_k=40,top_p=0.9,seed=12345678901234567890"):
        assert name_sampling(read_sampling(text)) == text
    assert read_sampling("seed=3, temperature=0.5") == Options(temperature=0.5, seed=3)


@pytest.fixture
def measured(toy_plan: Path, report: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """The rows of a command of `outrider bench` on the toy plan, a few tokens."""
    sizes = ("--prompts", toy_plan.parent / "held_out.jsonl", "--count", 1, "--new", 8, "--reps", 1)
    return lambda command, *more: report(bench.main, command, toy_plan, *sizes, *more)["rows"]


@pytest.fixture
def priced(toy_plan: Path, tmp_path: Path) -> Path:
    """A copy of the toy plan with a table of prices."""
    plan = shutil.copytree(toy_plan, tmp_path / "plan")
    table = PassPrices(
        identity=read_manifest(plan).identity, backend="onnxruntime-cpu", device="a processor", threads=2, context=64,
        prices=(Price(rows=1, ms=1.0), Price(rows=8, ms=2.0)),
    )  # fmt: skip
    write_pass_prices(table, plan)
    return plan


def asked(plan: Path, recipe: Path, drafters: str, depths: str) -> argparse.Namespace:
    settings = {"tree": None, "overrides": [], "backend": None, "drafters": drafters, "depth": read_depths(depths)}
    return argparse.Namespace(plan=plan, recipe=recipe, **settings)


@pytest.mark.long
def test_every_depth_is_built_with_the_prices_of_the_plan(priced: Path, toy_recipe: Path) -> None:
    with plan_to_measure(asked(priced, toy_recipe, "block,mixed", "1,8,own")) as (plan, measured):
        built = read_manifest(plan)
        table, own = read_pass_prices(plan), read_pass_prices(priced)
    assert [(v.drafter, v.depth) for v in measured] == [
        ("none", 0), ("block", 1), ("block", 5), ("mixed", 1), ("mixed", 8), ("mixed", 6)
    ]  # fmt: skip
    mixed = [d for d in built.drafters if isinstance(d, NgramDrafter)]
    assert [(d.max_draft, d.least) for d in mixed] == [(1, 1), (8, 2), (6, 2)]
    assert own is not None
    assert table == own.model_copy(update={"identity": built.identity}) != own


def test_a_shape_that_ends_with_the_block_may_be_the_plan_s_own(priced: Path, toy_recipe: Path) -> None:
    with plan_to_measure(asked(priced, toy_recipe, "block", "8,own")) as (plan, measured):
        assert plan == priced
        assert [(v.name, v.depth) for v in measured] == [("none", 0), ("block", 5)]


def test_tokens_of_a_block_are_read_without_pytorch(toy_recipe: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from outrider.compiler.recipe import load_recipe; "
        "from outrider.tools.bench.variants import tokens_of_block; recipe = load_recipe(Path(sys.argv[1])); "
        "section = next(d for d in recipe.drafters if d.kind == 'block'); "
        "print(tokens_of_block(recipe, section), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(toy_recipe)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["5", "False"]


@pytest.mark.long
def test_a_sweep_covers_lengths_and_trees(measured: Any) -> None:
    rows = measured("sweep", "--drafters", "ngram", "--prompt-len", "20,40,20", "--depth", "2,own")
    assert [(row["prompt_tokens"], row["drafter"], row["depth"]) for row in rows] == [
        (length, drafter, depth) for length in (20, 40) for drafter, depth in (("none", 0), ("ngram", 2), ("ngram", 6))
    ]
    assert rows[0]["baseline_tokens_per_second"] == rows[2]["baseline_tokens_per_second"]
    assert all(row["same_tokens"] and not row["auto_disable"] for row in rows)


def test_a_sweep_takes_drafters_without_trees_and_the_lengths_that_the_context_has_room_for(measured: Any) -> None:
    rows = measured("sweep", "--drafters", "ngram")
    assert [(row["drafter"], row["tree"], row["prompt_tokens"]) for row in rows] == [
        ("none", None, 64), ("ngram", None, 64),
    ]  # fmt: skip


def test_a_build_that_fails_is_a_sentence(toy_plan: Path, monkeypatch: pytest.MonkeyPatch, output: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(toy_plan.parent))
    monkeypatch.setattr("sys.executable", "/bin/false")
    prompts = ("--prompts", toy_plan.parent / "held_out.jsonl")
    said = output(bench.main, "latency", toy_plan, *prompts, "--tree", "1/1/3", "--drafters", "head", status=2)
    assert "A plan of head.1 cannot be built: exit status 1" in said
    assert not list(toy_plan.parent.glob("outrider-bench-*"))
