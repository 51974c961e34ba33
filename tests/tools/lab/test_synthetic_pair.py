"""The synthetic pair: a target, a draft model that is its first layers, and a recipe of the two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.held_out import read_prompts
from outrider.compiler.recipe import load_recipe
from outrider.tools.lab import synthetic_llama, synthetic_pair
from outrider.tools.lab.synthetic_llama import LlamaShape
from outrider.tools.lab.synthetic_pair import Shape, commits, loops, repeated, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("pair") / "deep" / "er"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_pair, "_SHORT", 24)
        patch.setattr(synthetic_pair, "_LONG", 96)
        return out, write_pair(500_000, out, layers=4, seed=3)


def test_the_draft_model_is_the_first_layers_of_the_target_and_right_about_as_often_as_asked(pair: Any) -> None:
    out, made = pair
    target, draft = (AutoModelForCausalLM.from_pretrained(out / name).state_dict() for name in ("target", "draft"))
    assert {key.split(".")[2] for key in target if ".layers." in key} == {"0", "1", "2", "3"}
    assert {key.split(".")[2] for key in draft if ".layers." in key} == {"0"}
    assert all(torch.equal(target[key], tensor) for key, tensor in draft.items())
    assert made["parameters"] == sum(t.numel() for t in target.values()) == pytest.approx(500_000, rel=0.1)
    assert 0.45 < made["agreement"] < 0.78
    assert 1.7 < made["tokens_per_verify"] < 3.3
    assert made["repeated"] < 0.1
    assert made["looping"] <= 1


def test_the_recipe_names_files_that_are_there(pair: Any) -> None:
    out, made = pair
    recipe = load_recipe(out / "model.yaml")
    assert (made["recipe"], [d.kind for d in recipe.drafters]) == (str(out / "model.yaml"), ["model"])
    assert recipe.held_out_path is not None
    tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    text = read_prompts(recipe.held_out_path)[0] + "\tü\U0001f600"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_llama_is_written_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Any) -> None:
    assert synthetic_llama.SHAPES["llama-3.2-1b"].parameters == 1_235_814_400  # as published
    small = LlamaShape(layers=3, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=1100)
    monkeypatch.setitem(synthetic_llama.SHAPES, "llama-3.2-1b", small)
    made = report(synthetic_pair.main, "--like", "llama-3.2-1b", "--out", tmp_path / "out")
    folder = tmp_path / "out" / "target"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sum(p.numel() for p in model.parameters()) == made["parameters"] == small.parameters
    assert len(list(folder.glob("model-*-of-00004.safetensors"))) == 4
    assert torch.equal(load_decoder(folder).layers[2].up.weight.T, model.model.layers[2].mlp.up_proj.weight.float())
    weights = load_recipe(Path(made["recipe"])).target.weights
    assert weights is not None
    assert weights.form.bits == 4


def test_sizes_are_met_and_the_same_seed_gives_the_same_weights() -> None:
    for parameters in (10_000_000, 40_000_000, 150_000_000):
        s = Shape.from_parameters(parameters, None)
        found = 2 * 1024 * s.hidden + s.layers * (3 * s.hidden**2 + 3 * s.hidden * s.intermediate)
        assert found == pytest.approx(parameters, rel=0.01)
    shape = Shape.from_parameters(500_000, 4)
    first, again, other = (synthetic_pair.draw_target(shape, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_steps_repeats_and_circles_are_counted() -> None:
    right = [True, True, False, True, True, True, True, True, False, False, True, True, True]
    assert commits(right, 4) == [3, 5, 1]
    assert (repeated([1, 2, 3, 4, 5, 6]), repeated([1, 2, 1, 2, 1, 2, 1])) == (0, 0.5)
    assert loops([9, 8, 7, 1, 2, 1, 2, 1, 2])
    assert not loops([9, 8, 7, 1, 2, 3, 1, 2, 4])


def test_what_cannot_be_made_is_refused(tmp_path: Path, output: Callable[..., str]) -> None:
    assert [synthetic_pair._count(text) for text in ("150m", "1.5M", "7")] == [150_000_000, 1_500_000, 7]
    (tmp_path / "file").write_text("mine")
    new = ("--out", tmp_path / "new")
    for arguments, said in (
        (("--params", "0m", *new), "--params is '0m'; pass a number of parameters"),
        (("--params", "1m", "--agreement", "1", *new), "--agreement is '1'; pass a number between 0 and 1"),
        (("--params", "1k", *new), "--params 1000 is too small"),
        (("--params", "1m", "--layers", 4, "--draft-layers", 4, *new), "--draft-layers is 4; the target has 4 layers"),
        (("--params", "1m", "--out", tmp_path), "is not an empty folder; choose another --out"),
        (("--like", "llama-3.2-1b", "--draft-layers", 2, *new), "--draft-layers is of a pair; leave it out"),
    ):
        assert said in output(synthetic_pair.main, *arguments, status=2)
    assert not (tmp_path / "new").exists()
