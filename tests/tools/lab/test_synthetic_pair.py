"""The synthetic pair: a target, a draft model that is its first layers, and a recipe of the two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.held_out import read_prompts
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import OutriderError
from outrider.tools.lab import synthetic_llama, synthetic_pair
from outrider.tools.lab.synthetic_llama import LlamaShape
from outrider.tools.lab.synthetic_pair import Shape, commits, loops, repeated, write_pair

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("pair") / "deep" / "er"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_pair, "_SHORT", 24)
        patch.setattr(synthetic_pair, "_LONG", 96)
        return out, write_pair(500_000, out, layers=4, seed=3)


def test_the_draft_model_is_the_first_layers_of_the_target(pair: tuple[Path, dict]) -> None:
    out, made = pair
    target, draft = (AutoModelForCausalLM.from_pretrained(out / name).state_dict() for name in ("target", "draft"))
    assert {key.split(".")[2] for key in target if ".layers." in key} == {"0", "1", "2", "3"}
    assert {key.split(".")[2] for key in draft if ".layers." in key} == {"0"}
    assert all(torch.equal(target[key], tensor) for key, tensor in draft.items())
    assert made["parameters"] == sum(t.numel() for t in target.values())
    assert abs(made["parameters"] - 500_000) < 50_000


def test_it_is_right_about_as_often_as_asked_and_the_text_goes_on(pair: tuple[Path, dict]) -> None:
    _, made = pair
    assert 0.45 < made["agreement"] < 0.78
    assert 1.7 < made["tokens_per_verify"] < 3.3
    assert made["repeated"] < 0.1
    assert made["looping"] <= 1


def test_the_recipe_names_files_that_are_there(pair: tuple[Path, dict]) -> None:
    out, made = pair
    recipe = load_recipe(out / "model.yaml")
    assert made["recipe"] == str(out / "model.yaml")
    assert [d.kind for d in recipe.drafters] == ["model"]
    assert recipe.held_out_path is not None
    prompts = read_prompts(recipe.held_out_path)
    tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    text = prompts[0] + "\tü\U0001f600"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_llama_is_written_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    small = LlamaShape(layers=3, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=1100)
    monkeypatch.setitem(synthetic_llama.SHAPES, "llama-3.2-1b", small)
    assert synthetic_pair.main(["--like", "llama-3.2-1b", "--out", str(tmp_path / "out"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    folder = tmp_path / "out" / "target"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sum(p.numel() for p in model.parameters()) == made["parameters"] == small.parameters
    assert len(list(folder.glob("model-*-of-00004.safetensors"))) == 4
    assert torch.equal(load_decoder(folder).layers[2].up.weight.T, model.model.layers[2].mlp.up_proj.weight.float())
    weights = load_recipe(Path(made["recipe"])).target.weights
    assert weights is not None
    assert weights.form.bits == 4


def test_the_published_geometry_has_its_published_size() -> None:
    assert synthetic_llama.SHAPES["llama-3.2-1b"].parameters == 1_235_814_400


def test_the_same_seed_gives_the_same_weights() -> None:
    shape = Shape.from_parameters(500_000, 4)
    first, again, other = (synthetic_pair.draw_target(shape, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("parameters", [10_000_000, 40_000_000, 150_000_000])
def test_sizes_are_met(parameters: int) -> None:
    s = Shape.from_parameters(parameters, None)
    found = 2 * 1024 * s.hidden + s.layers * (3 * s.hidden**2 + 3 * s.hidden * s.intermediate)
    assert abs(found / parameters - 1) < 0.01


def test_steps_repeats_and_circles_are_counted() -> None:
    right = [True, True, False, True, True, True, True, True, False, False, True, True, True]
    assert commits(right, 4) == [3, 5, 1]
    assert repeated([1, 2, 3, 4, 5, 6]) == 0
    assert repeated([1, 2, 1, 2, 1, 2, 1]) == 0.5
    assert loops([9, 8, 7, 1, 2, 1, 2, 1, 2])
    assert not loops([9, 8, 7, 1, 2, 3, 1, 2, 4])


def test_the_command_prints_one_object(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def write(parameters: int, out: Path, **options: object) -> dict[str, object]:
        asked.append((parameters, out, options.get("layers"), options["seed"]))
        return {"recipe": "x"}

    monkeypatch.setattr(synthetic_pair, "write_pair", write)
    for written, number in (("150m", 150_000_000), ("1.5M", 1_500_000), ("64k", 64_000), ("7", 7)):
        assert synthetic_pair.main(["--params", written, "--out", "o", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"recipe": "x"}
        assert asked.pop() == (number, Path("o"), None, 0)
    for wrong in (["--params", "0m"], ["--params", "big"], ["--params", "1m", "--agreement", "1"]):
        assert synthetic_pair.main([*wrong, "--out", "o"]) == 2
        assert wrong[-2] in capsys.readouterr().err


def test_what_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path, capsys: Captured) -> None:
    assert synthetic_pair.main(["--params", "1k", "--out", str(tmp_path / "new")]) == 2
    assert "--params 1000 is too small" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert synthetic_pair.main(["--params", "1m", "--out", str(tmp_path)]) == 2
    assert "is not an empty folder; choose another --out" in " ".join(capsys.readouterr().err.split())
    assert synthetic_pair.main(["--like", "llama-3.2-1b", "--draft-layers", "2", "--out", str(tmp_path / "new")]) == 2
    assert "--draft-layers is of a pair; leave it out" in capsys.readouterr().err
    with pytest.raises(OutriderError, match="--draft-layers is 4; the target has 4 layers"):
        write_pair(500_000, tmp_path / "new", layers=4, draft_layers=4)
    assert not (tmp_path / "new").exists()
