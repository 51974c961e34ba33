"""The EAGLE3 head against a NumPy forward pass written from the formulas; layouts, and what is read of each."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from outrider.compiler.deferred import deferred
from outrider.compiler.inspect import describe, print_description
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import Eagle3Overrides

from .block_heads import Array, KeptRow, NumpyLayers, agree
from .eagle3_heads import (
    LAYOUTS,
    SAFETENSORS,
    K,
    Layout,
    O,
    Q,
    V,
    change,
    change_config,
    defer_eagle3,
    load_eagle3,
    pack_head,
    read_eagle3_config,
    refused,
    target_config,
    write_eagle3,
)

PAIRS, LEVELS, START = 6, 2, 3
WIDTHS = {"target_hidden": 16, "vocab": 60, "draft_vocab": 25}
PROJECTIONS = {
    "fc.weight", Q, K, V, O, "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight", "lm_head.weight",
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "whole-vocabulary": {"draft_vocab": None},
    "one-kv-head": {"kv_heads": 1},
    "wide-heads": {"head_dim": 12},
    "other-width": {"hidden": 24, "own_embedding": True},
    "fc-norm": {"fc_norm": True},
    "fc-norm-and-norm-output": {"fc_norm": True, "norm_output": True, "hidden": 24, "own_embedding": True},
    "rope-theta": {"rope_theta": 500.0},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
}


class NumpyHead(NumpyLayers):
    """An EAGLE3 head over one row, whose keys and values grow with every call of `level`."""

    def __init__(self, tensors: dict[str, Tensor], case: dict[str, object]) -> None:
        super().__init__(tensors, 4, int(str(case.get("kv_heads", 2))), len(tensors[Q]) // 4)
        self.theta = float(str(case.get("rope_theta", 10000.0)))
        self.stretch = 2.5 if "rope_scaling" in case else 1.0
        self.feeds_normed = bool(case.get("norm_output"))
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def fuse(self, features: Array) -> Array:
        if "fc_norm.0.weight" in self.w:
            streams = np.split(features, 3, axis=-1)
            features = np.concatenate([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(streams)], axis=-1)
        return self.linear(features, "fc")

    def level(self, h: Array, embedded: Array, positions: list[int]) -> Array:
        """Rows one after another, each seeing all keys before it and its own."""
        return np.stack([self._row(h[i], embedded[i], position) for i, position in enumerate(positions)])

    def _row(self, h: Array, embedded: Array, position: int) -> Array:
        x = np.concatenate([self.norm(embedded, "midlayer.input_layernorm"), self.norm(h, "midlayer.hidden_norm")])
        q, k, v = (self.linear(x, name.removesuffix(".weight")).reshape(-1, self.head_dim) for name in (Q, K, V))
        self.keys.append(self.rotated(k, position))
        self.values.append(v)
        attended = self.attended(self.rotated(q, position), np.stack(self.keys), np.stack(self.values))
        h = h + self.linear(attended, O.removesuffix(".weight"))
        return h + self.unit(self.norm(h, "midlayer.post_attention_layernorm"), "midlayer.mlp")

    def logits(self, h: Array) -> Array:
        return self.linear(self.norm(h, "norm"), "lm_head")

    def fed_back(self, h: Array) -> Array:
        return self.norm(h, "norm") if self.feeds_normed else h


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_features_levels_and_logits_equal_numpy(case: str, layout: Layout, tmp_path: Path) -> None:
    changes = CASES[case]
    tensors = write_eagle3(tmp_path, layout=layout, **(WIDTHS | changes))  # type: ignore[arg-type]
    expect_numpy(load_eagle3(tmp_path, target_config()), tensors, changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("bits", "size", "symmetric"), [(4, 32, True), (8, 64, False), (4, 16, False), (8, None, True)]
)
def test_a_packed_head_is_that_of_the_numbers_that_its_integers_stand_for(
    bits: int, size: int | None, symmetric: bool, layout: Layout, tmp_path: Path
) -> None:
    wide = {"target_hidden": 64, "intermediate": 128, "heads": 4, "head_dim": 16, "draft_vocab": 25, "fc_norm": True}
    before = write_eagle3(tmp_path, layout=layout, **wide)  # type: ignore[arg-type]
    numbers = pack_head(tmp_path, bits, size, symmetric)
    assert {name for name in before if not torch.equal(before[name], numbers[name])} == PROJECTIONS
    target = target_config(hidden=64)
    head = load_eagle3(tmp_path, target)
    expect_numpy(head, numbers, wide)
    stored = deferred(defer_eagle3(tmp_path, target))
    loaded = dict(head.named_parameters())
    assert all(torch.equal(each.read(), loaded[name]) for name, each in stored.items())
    sources = {each.stored_name: each.tensors.quantized(each.stored_name) for each in stored.values()}
    kept = {name: source for name, source in sources.items() if source is not None}
    assert kept.keys() == (PROJECTIONS if size != 16 else set())  # a block of 32 inputs has one scale
    assert all((source.bits, source.minimums) == (bits, not symmetric) for source in kept.values())


def expect_numpy(head: Eagle3Head, tensors: dict[str, Tensor], changes: dict[str, object]) -> None:
    """The head computes on random features what NumPy does with its tensors."""
    oracle = NumpyHead(tensors, changes)
    rng = np.random.default_rng(1)
    shape = head.config.vocab_size, head.config.hidden_size
    table = tensors.get("embed_tokens.weight", torch.from_numpy(rng.standard_normal(shape).astype(np.float32)))
    assert (head.embedding is None) == ("embed_tokens.weight" not in tensors)
    if head.embedding is not None:
        assert torch.equal(head.embedding, table)
    features = rng.standard_normal((PAIRS, head.config.feature_size))
    tokens = rng.integers(60, size=PAIRS + LEVELS)

    h = head.fuse(torch.from_numpy(features).float())
    expected = oracle.fuse(features)
    agree(h, expected)
    execution = KeptRow(head.config)
    steps = [(0, PAIRS), *((PAIRS + level, PAIRS + level + 1) for level in range(LEVELS))]
    for first, last in steps:
        positions = list(range(START + first, START + last))
        embedded = table[tokens[first:last]]
        execution.positions = positions
        normed, h = head.layer(head.fuse(h), embedded, execution)
        residual = oracle.level(expected, embedded.double().numpy(), positions)
        expected = oracle.fed_back(residual)
        agree(h, expected)
        agree(head.logits(normed), oracle.logits(residual))
        h, expected = h[-1:], expected[-1:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_of_layers_whose_output_is_read_are_one_lower(layout: Layout, tmp_path: Path) -> None:
    """What SpecForge names by default for 94 layers, [1, 46, 90], is ours, [2, 47, 91]."""
    target = target_config(layers=94)
    write_eagle3(tmp_path, layout=layout)
    default = read_eagle3_config(tmp_path, target).aux_layers
    write_eagle3(tmp_path, layout=layout, aux_layer_ids=[1, 46, 90])
    assert read_eagle3_config(tmp_path, target).aux_layers == default == (2, 47, 91)


BY_FIRST, LEFT = "eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids"


@pytest.mark.parametrize(
    ("keys", "taps", "reason"),
    [
        # As vLLM, speculators and TorchSpec write them.
        ({BY_FIRST: [2, 4, 5]}, (2, 4, 5), f"{BY_FIRST} [2, 4, 5], first id not 1: indices of hidden_states"),
        ({"eagle_config": {BY_FIRST: [5, 1, 2]}}, (5, 1, 2), "first id not 1: indices of hidden_states"),
        ({BY_FIRST: [1, 3, 5]}, (2, 4, 6), "first id 1: layers whose output is read"),
        ({LEFT: [2, 0, 1]}, (3, 1, 2), f"{LEFT} [2, 0, 1], layers whose output is read"),
        ({"eagle_config": {LEFT: [2, 4, 5]}}, (3, 5, 6), f"eagle_config.{LEFT} [2, 4, 5], layers whose"),
        ({LEFT: [1, 3, 4], BY_FIRST: [2, 4, 5]}, (2, 4, 5), BY_FIRST),  # AngelSlim writes both
    ],
)
def test_the_key_and_the_first_id_say_how_layers_are_counted(
    keys: dict[str, Any], taps: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    write_eagle3(tmp_path)
    change_config(tmp_path, **keys)
    found = read_eagle3_config(tmp_path, target_config(layers=8)).taps
    assert found.layers == taps
    assert reason in found.reason


@pytest.mark.parametrize("nested", [False, True])
def test_a_key_that_only_seems_to_name_taps_is_refused(nested: bool, tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_states_layer_ids"):
        change_config(tmp_path, **({"eagle_config": {key: [1, 3, 4]}} if nested else {key: [1, 3, 4]}))
        refused(tmp_path, f"{key} is read by no project that is known here", "set aux_layers in the recipe")
        given = Eagle3Overrides(aux_layers=(1, 4, 6))
        taps = read_eagle3_config(tmp_path, target_config(), given).taps
        assert taps == ((1, 4, 6), "aux_layers of the recipe")
        change_config(tmp_path, **{key: None}, eagle_config=None)


def test_the_reason_is_in_the_plan_and_shown(tmp_path: Path, toy_plan: Path, reference_plan: Path) -> None:
    shown = [describe(plan) for plan in (toy_plan, reference_plan)]
    taps = [next(d["taps"] for d in each["drafters"] if d["kind"] == "eagle3") for each in shown]
    assert (taps[0]["layers"], taps[1]["layers"]) == ((0, 1, 2), (2, 4, 5))
    console = Console(file=StringIO(), width=400)
    print_description(shown[1], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2, 4, 5: eagle_config.eagle_aux_hidden_state_layer_ids [1, 3, 4], first id 1: layers whose" in printed


@pytest.mark.parametrize("ids", [[0, 1], [0, 1, 1], [-1, 2, 3], [1, 3, 7], [1, 3, "5"], 3])
@pytest.mark.parametrize("layout", ["specforge", "angelslim"])
def test_wrong_taps(ids: list[int], layout: Layout, tmp_path: Path) -> None:
    write_eagle3(tmp_path, layout=layout, aux_layer_ids=ids)
    refused(tmp_path, "config.json: ", "layer_ids", "must be ", ", found ")


def test_taps_that_contradict_each_other_and_targets_of_few_layers(tmp_path: Path) -> None:
    write_eagle3(tmp_path, layout="specforge", aux_layer_ids=[1, 2, 3])
    change_config(tmp_path, aux_hidden_states_layer_ids=[1, 2, 4])
    other = "([2, 3, 4]); and aux_hidden_states_layer_ids [1, 2, 4], layers", "([2, 3, 5])"
    refused(tmp_path, "layer_ids [1, 2, 3], first id 1", *other, "set aux_layers in the recipe")
    change_config(tmp_path, aux_hidden_states_layer_ids=None, eagle_aux_hidden_state_layer_ids=[2, 3, 5])
    refused(tmp_path, "eagle_aux_hidden_state_layer_ids [2, 3, 5], first id not 1")
    write_eagle3(tmp_path)
    few = "the target has 6 layers, but three distinct default taps need 7"
    refused(tmp_path, few, "the recipe's aux_layers", target=target_config(layers=6))


TAPS = "eagle_aux_hidden_state_layer_ids"


def write_speculators(folder: Path, **head: Any) -> dict[str, Tensor]:
    """Write a random head as SpecForge would to `folder/other`, and the same in speculators' layout to `folder`."""
    tensors = write_eagle3(folder / "other", own_embedding=True, rope_theta=700.0, **head)
    raw = json.loads((folder / "other" / "config.json").read_text())
    outer = {key: raw.pop(key) for key in ("draft_vocab_size", "fc_norm", "norm_output") if key in raw}
    config = outer | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": raw,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        TAPS: [1, 4, 6],
    }
    (folder / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / SAFETENSORS)
    return renamed


@pytest.mark.parametrize("head", [{}, {"draft_vocab": 25}, {"fc_norm": True, "norm_output": True}])
def test_the_head_is_the_one_that_others_write(head: dict[str, Any], tmp_path: Path) -> None:
    write_speculators(tmp_path, **head)
    given = Eagle3Overrides(aux_layers=(1, 4, 6))
    other = load_eagle3(tmp_path / "other", target_config(), given=given)
    ours = load_eagle3(tmp_path, target_config())
    assert ours.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in ours.state_dict().items())
    assert ours.config.__dict__ | {"taps": other.config.taps} == other.config.__dict__
    unread = defer_eagle3(tmp_path, target_config())
    assert all(torch.equal(each.read(), ours.state_dict()[name]) for name, each in deferred(unread).items())


def test_taps_name_the_layers_that_streams_enter_with_any_first_id(tmp_path: Path) -> None:
    write_speculators(tmp_path)
    taps = read_eagle3_config(tmp_path, target_config()).taps
    assert taps == ((1, 4, 6), f"{TAPS} [1, 4, 6], indices of hidden_states, as speculators writes them")
    change_config(tmp_path, **{TAPS: None})
    assert read_eagle3_config(tmp_path, target_config()).aux_layers == (2, 4, 5)
    given = Eagle3Overrides(aux_layers=(0, 3, 5))
    assert read_eagle3_config(tmp_path, target_config(), given).aux_layers == (0, 3, 5)


LAYERS, ABOUT, TYPE = "transformer_layer_config", "speculators_config", "speculators_model_type"
UNKNOWN = "a key that is not known here and could change what the drafter computes; remove the key if it does not"
WRONG_TAPS: list[tuple[dict[str, Any], str]] = [
    ({TAPS: [1, 4, 4]}, f"{TAPS} must be 3 different layers of the target from 0 to 7, found [1, 4, 4]"),
    ({TYPE: "dflash"}, f"{TYPE} must be 'eagle3', found 'dflash'"),
    ({"norm_before_fc": True}, "norm_before_fc must be False, found True"),
    ({LAYERS: None}, f"{LAYERS} is missing; add it"),
    ({LAYERS: {"model_type": "qwen3"}}, f"{LAYERS}.model_type must be 'llama', found 'qwen3'"),
    *(({key: value}, f"{key} is {value!r}, {UNKNOWN}") for key, value in (
        ("some_future_norm", True), ("sliding_window", 128), ("aux_hidden_state_layer_ids", [1, 4, 6]),
    )),
    ({LAYERS: {"logits_scaling": 2.0}}, f"{LAYERS}.logits_scaling is 2.0, {UNKNOWN}"),
    ({LAYERS: {"mlp_bias": True}}, f"{LAYERS}.mlp_bias must be False, found True; EAGLE3 heads that differ in it"),
    ({LAYERS: {"quantization_config": {"bits": 4}}}, f"{LAYERS}.quantization_config describes quantised weights, and"),
    ({"quantization_config": {"quant_method": "fp8"}}, "this is an FP8 checkpoint (quantization_config), which is not"),
    ({ABOUT: {"algorithm": "dflash"}}, f"{ABOUT}.algorithm is 'dflash' and {TYPE} is 'eagle3'"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), WRONG_TAPS)
def test_what_is_wrong_is_named(edit: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_speculators(tmp_path)
    change_config(tmp_path, **edit)
    refused(tmp_path, "config.json: ", words)


def test_keys_without_effect_change_nothing(tmp_path: Path) -> None:
    """Those of published heads, of several versions of speculators and transformers."""
    write_speculators(tmp_path, draft_vocab=25)
    plain = read_eagle3_config(tmp_path, target_config())
    own = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    usual = {key: value for key, value in LlamaConfig().to_dict().items() if key != "rope_parameters"}
    unused = {"sliding_window": 2048, "layer_types": ["full_attention"], "quantization_config": {}}
    about = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "a/model"},
    }
    change_config(
        tmp_path, architectures=["Eagle3Speculator"], auto_map={"": "eagle3.Eagle3SpeculatorConfig"}, dtype="bfloat16",
        has_no_defaults_at_init=False, speculators_config=about, speculators_version="0.7.0", tie_word_embeddings=False,
        torch_dtype="bfloat16", transformers_version="4.57.1", transformer_layer_config=usual | own | unused,
    )  # fmt: skip
    assert read_eagle3_config(tmp_path, target_config()) == plain


def test_tensors_are_named_as_speculators_names_them(tmp_path: Path) -> None:
    tensors = write_speculators(tmp_path, draft_vocab=25)
    of_training = {"verifier_norm.weight": torch.ones(16), "verifier_lm_head.weight": torch.zeros(25, 16)}
    save_file(tensors | of_training, tmp_path / SAFETENSORS)
    load_eagle3(tmp_path, target_config())
    change(tmp_path, lambda stored: stored.pop("layers.0.mlp.up_proj.weight"))
    refused(tmp_path, "tensor 'layers.0.mlp.up_proj.weight' is missing", "an EAGLE3 head as speculators writes it")
