"""Checkpoints as users have them, from file to text: GGUF, AWQ, GPTQ, compressed-tensors, and heads with integers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from numpy.typing import NDArray
from torch import Tensor

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.deferred import deferred
from outrider.compiler.drafters import read_sources
from outrider.compiler.inspect import describe
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import Recipe, load_recipe
from outrider.plans.errors import RecipeError, RequestError
from outrider.plugins.quant_layout import QuantLayout, unpack
from outrider.plugins.reference import dequantize
from outrider.runtime.options.options import Options
from outrider.tools.verify.agreement import compare_drafters
from outrider.tools.verify.oracle import load_oracle
from outrider.tools.verify.verification import Extent, verify_plan
from tests.compiler.eagle3_heads import defer_eagle3, pack_head, write_eagle3
from tests.compiler.formats.ggufs import write_model
from tests.compiler.formats.models import TEXT, logits_of, random_model, tokenizer, write_tokenizer
from tests.compiler.formats.packed import write_packed
from tests.compiler.formats.test_packed_models import FORMATS
from tests.conftest import made_once

Q4_K_M = {"embed_tokens": "Q4_K", "lm_head": "Q6_K", "v_proj": "Q6_K", "down_proj": "Q5_K", "": "Q4_K"}
ENDS = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"


def write_recipe(folder: Path, checkpoint: str, **target: object) -> Path:
    (folder / "held_out.jsonl").write_text(json.dumps({"prompt": TEXT * 2}) + "\n", encoding="utf-8")
    recipe = {
        "name": "formats",
        "target": {"checkpoint": checkpoint, **target},
        "drafters": [{"name": "ngram", "kind": "ngram", "max_draft": 6, "min_confidence": 0.0}],
        "capacity": {"context": 128, "prefill_chunk": 16},
        "held_out": "held_out.jsonl",
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder / "model.yaml"


def checked(recipe: Path, out: Path) -> Path:
    """Build the plan; its logits are the checkpoint's but for the rounding of activations, drafts change no token."""
    build(load_recipe(recipe), recipe, out)
    result = verify_plan(load_recipe(recipe), out, Extent(prompts=1, new_tokens=24))
    assert result.passed, result
    assert 0 < result.max_logit_error < 0.3
    runtime = Runtime.load(out)
    drafted = runtime.generate(TEXT, max_new_tokens=24, drafter="ngram", ignore_eos=True)
    assert drafted.token_ids == runtime.generate(TEXT, max_new_tokens=24, drafter="none", ignore_eos=True).token_ids
    assert drafted.text
    return out


def stored(plan: Path) -> set[str]:
    return set(describe(plan)["backends"]["onnxruntime-cpu"]["engines"]["target"]["weights"])


def test_gguf_to_text(tmp_path: Path) -> None:
    """The file alone makes the plan: weights, tokenizer, end token and chat template."""
    model = random_model()
    metadata = {**ENDS, "tokenizer.chat_template": TEMPLATE}
    write_model(tmp_path / "model.gguf", model, "Q4_0", tokenizer(), metadata)
    recipe = write_recipe(tmp_path, "model.gguf")
    plan = checked(recipe, tmp_path / "plan")
    assert stored(plan) == {"int4", "float32", "int64"}
    runtime = Runtime.load(plan)
    assert runtime.tokenizer.encode(TEXT) == tokenizer().encode(TEXT).ids
    asked = [{"role": "user", "content": "Why?"}]
    assert runtime.tokenizer.apply_chat_template(asked) == "user: Why?\n<|end|>"
    assert runtime.manifest.text.eos_token_ids == (1,)
    oracle = load_oracle(load_recipe(recipe))
    assert "stores weights as integers" in oracle.name
    ids = runtime.tokenizer.encode(TEXT)
    assert (oracle.logits(ids, 5) - logits_of(model, ids)[-5:]).abs().max() < 2e-5
    with pytest.raises(RequestError, match="stores weights as integers"):
        load_oracle(load_recipe(recipe), "transformers")


def test_integers_of_another_form_are_rounded_where_the_recipe_allows_it(tmp_path: Path) -> None:
    """Q4_K_M, the file that most users have, mixes Q4_K with Q6_K."""
    file = tmp_path / "model.gguf"

    def refused(target: dict[str, object], *said: str, backend: str = "onnxruntime-cpu") -> None:
        recipe = write_recipe(tmp_path, "model.gguf", **target)
        with pytest.raises(RecipeError) as error:
            build(load_recipe(recipe).for_backends([backend]), recipe, tmp_path / "plan")
        for part in (str(recipe), str(file), *said):
            assert part in str(error.value)

    write_model(file, random_model(), "Q8_0", tokenizer(), ENDS)
    refused({"weights": {"type": "int4"}}, "as Q8_0, integers of 8 bits, and int4 is asked for")
    write_model(file, random_model(), "Q4_1", tokenizer(), ENDS)
    unsigned = "tensorrt-rtx reads integers with a sign alone", "embed_tokens.weight' as Q4_1, unsigned"
    refused({"dtype": "float16"}, *unsigned, backend="tensorrt-rtx")
    write_model(file, random_model(), Q4_K_M, tokenizer(), ENDS)
    refused({}, "target.weights is not set", "v_proj.weight' as Q6_K", "{type: int8, requantize: true}")
    refused({"weights": {"type": "int8"}}, "requantize is false", "as Q6_K", "no blocks of 32 inputs hold")
    recipe = write_recipe(tmp_path, "model.gguf", weights={"type": "int4", "requantize": True})
    assert {"int4", "int8"} < stored(checked(recipe, tmp_path / "plan"))


@pytest.mark.parametrize("name", ["awq", "gptq, activations ordered", "compressed int8"])
def test_packed_folder_to_text(name: str, tmp_path: Path) -> None:
    pack, settings, family, changes = FORMATS[name]
    write_packed(tmp_path / "model", random_model(family, **changes), pack, settings)
    write_tokenizer(tmp_path / "model")
    # A section is for what the checkpoint has as floats, here the head and the embedding.
    section = {"weights": {"type": "int8"}} if name == "awq" else {}
    plan = checked(write_recipe(tmp_path, "model", **section), tmp_path / "plan")
    integers = {"awq": {"int4", "int8"}, "gptq, activations ordered": {"int4"}, "compressed int8": {"int8"}}
    assert stored(plan) == {*integers[name], "float32", "int64"}


def write_drafting_recipe(folder: Path) -> Path:
    """A folder of floats as the target, and a GGUF file of the same model as its drafter."""
    model = random_model()
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    write_model(folder / "draft.gguf", model, "Q8_0", tokenizer(), ENDS)
    recipe = write_recipe(folder, "model")
    values = yaml.safe_load(recipe.read_text())
    values["drafters"] = [{"name": "draft", "kind": "model", "checkpoint": "draft.gguf", "gamma": 2}]
    recipe.write_text(yaml.safe_dump(values))
    return recipe


def test_a_gguf_file_that_drafts_must_have_the_targets_tokens(tmp_path: Path) -> None:
    recipe = write_drafting_recipe(tmp_path)
    sources = read_sources(load_recipe(recipe), read_config(tmp_path / "model"))
    assert [source.section.name for source in sources] == ["draft"]
    write_model(tmp_path / "draft.gguf", random_model(), "Q8_0", tokenizer("README.md"), ENDS)
    with pytest.raises(RecipeError, match="has a tokenizer in which"):
        read_sources(load_recipe(recipe), read_config(tmp_path / "model"))


@pytest.mark.long
def test_a_gguf_file_drafts(tmp_path: Path) -> None:
    recipe = write_drafting_recipe(tmp_path)
    build(load_recipe(recipe), recipe, tmp_path / "plan")
    runtime = Runtime.load(tmp_path / "plan")
    plain, drafted = (
        runtime.generate(TEXT, max_new_tokens=24, drafter=drafter, ignore_eos=True) for drafter in ("none", "draft")
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.tokens_per_verify > 2  # it is nearly the target itself


CPU = "onnxruntime-cpu"
BITS = (4, 8)
PROMPTS = [[(41 * i) % 299 + 1 for i in range(length)] for length in (60, 9, 1)]


def write_head(folder: Path, bits: int) -> dict[str, Tensor]:
    """A head for the toy with all projections packed, and an embedding of its own."""
    write_eagle3(
        folder, target_hidden=32, vocab=300, draft_vocab=120, intermediate=64, aux_layer_ids=[0, 1, 2],
        own_embedding=True,
    )  # fmt: skip
    return pack_head(folder, bits)


def recipe_of(toy_recipe: Path, head: Path, *overrides: str, weights: str = "null") -> Recipe:
    section = (
        f"{{name: head, kind: eagle3, checkpoint: {head}, weights: {weights}, tree: {{top_k: 3, depth: 2, nodes: 9}}}}"
    )
    return load_recipe(toy_recipe, [f"drafters=[{section}]", *overrides])


@pytest.fixture(scope="module", params=BITS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, f"head-int{request.param}", lambda folder: write_head(folder, request.param))


@pytest.fixture(scope="module")
def plan(head: Path, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipe_of(toy_recipe, head)
    return made_once(tmp_path_factory, f"{head.name}-plan", lambda out: build(recipe, toy_recipe, out))


def test_the_engine_has_the_integers_of_the_checkpoint(plan: Path, head: Path, toy_recipe: Path) -> None:
    """All of them, though some products became one; the embedding, a table of floats, stays one."""
    graph = onnx.load(plan / "engines" / CPU / "head.onnx").graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found: dict[str, NDArray[np.float32]] = {}
    for node in graph.node:
        if node.op_type == "QuantMatMul":
            given = {attribute.name: attribute.i for attribute in node.attribute}
            layout = QuantLayout(given["N"], given["K"], given["bits"], given.get("wide", 0), given.get("minimums", 0))
            found[node.input[1]] = dequantize(*unpack(weights[node.input[1]], layout))
            assert layout.bits == int(head.name[-1])
    stored = deferred(defer_eagle3(head, read_config(toy_recipe.parent / "target")))
    rows = {row.tobytes() for matrix in found.values() for row in matrix}
    kept = [each for name, each in stored.items() if each.tensors.quantized(each.stored_name) is not None]
    assert len(kept) == 9
    for each in kept:
        for row in each.read_stored().numpy():
            assert row.tobytes() in rows, each.stored_name
    assert [each.dtype for each in weights.values() if each.shape == (300, 32)] == [np.float32]
    assert not [node for node in graph.node if node.op_type == "MatMul"]


@pytest.mark.parametrize("options", [Options(temperature=0.0), Options(temperature=0.9, seed=3)])
def test_tokens_are_those_of_plain_decoding(plan: Path, options: Options) -> None:
    runtime = Runtime.load(plan, threads=1)
    (check,) = compare_drafters(
        runtime.session(), PROMPTS, ["head"], options | Options(max_new_tokens=24), 0.0, exact=True
    ).values()
    assert check.tokens == 24 * len(PROMPTS)
    assert check.partings == []


def test_weights_of_the_recipe_round_integers_again_only_where_it_says_so(toy_recipe: Path, tmp_path: Path) -> None:
    """As for decoders: integers are kept, the embedding, which is stored as floats, is rounded."""

    def engine() -> dict[str, Any]:
        shown: dict[str, Any] = describe(tmp_path / "plan")["backends"][CPU]["engines"]["head"]
        return shown

    write_head(tmp_path / "head", 8)
    build(recipe_of(toy_recipe, tmp_path / "head", weights="{type: int8}"), toy_recipe, tmp_path / "plan")
    assert any(op.endswith("QuantGather") for op in engine()["ops"])
    assert set(engine()["weights"]) - {"bool", "int64"} == {"int8", "float32"}
    with pytest.raises(RecipeError, match=r"drafters\[0\]\.weights\.requantize is false, and .* integers of 8 bits"):
        build(recipe_of(toy_recipe, tmp_path / "head", weights="{type: int4}"), toy_recipe, tmp_path / "plan")
    again = recipe_of(toy_recipe, tmp_path / "head", weights="{type: int4, requantize: true}")
    build(again, toy_recipe, tmp_path / "plan")
    assert "int4" in engine()["weights"]
