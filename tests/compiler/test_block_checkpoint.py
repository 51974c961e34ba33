"""What a block drafter's folder must hold, what is read from it, and the sentence for each way in which it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.compiler.deferred import deferred
from outrider.compiler.models.block_config import BlockConfig, Confidence, Markov
from outrider.compiler.models.drafting import BlockDraft
from outrider.compiler.models.eagle3_config import Taps
from outrider.compiler.models.rope import RopeScaling
from outrider.plans.errors import CheckpointError

from .block_heads import (
    HIDDEN,
    LAYOUTS,
    MASK,
    UP,
    VOCAB,
    KeptContext,
    Layout,
    Q,
    defer_block,
    load_block,
    random_target,
    read_block_config,
    refused,
    write_block,
)
from .eagle3_heads import PICKLED, SAFETENSORS, change, change_config, target_config

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def test_the_same_weights_give_the_same_logits_in_every_layout(tmp_path: Path) -> None:
    """With the target's embedding and output weights, as z-lab, or with copies of both; DeepSpec either way."""
    target = random_target()
    assert target.lm_head is not None
    body = write_block(tmp_path / "zlab")
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head.weight.T.contiguous()}
    features, block = torch.randn(6, 48), torch.tensor([7, 59, 59, 59, 59])

    def logits(layout: Layout, tensors: dict[str, Tensor]) -> Tensor:
        write_block(tmp_path / layout, layout=layout, seed=1)
        save_file(tensors, tmp_path / layout / SAFETENSORS)
        head = load_block(tmp_path / layout, target_config())
        assert (head.embedding is None) == (head.lm_head is None) == (tensors is body)
        execution, draft = KeptContext(head), BlockDraft(head, target)
        execution.keep(features)
        return draft.logits(execution.block(draft.embed(block)))

    wanted = logits("zlab", body)
    torch.testing.assert_close(logits("deepspec", body), wanted)
    for layout in ("deepspec", "speculators-dflash", "speculators-dspark"):
        torch.testing.assert_close(logits(layout, body | copies), wanted)  # type: ignore[arg-type]
    assert not torch.allclose(logits("jetspec", body)[:-1], wanted[:-1])  # its last slot alone sees the whole block


def test_weights_are_in_the_type_and_layout_asked_for(tmp_path: Path) -> None:
    """Tables of tokens are looked up, and so not transposed."""
    tensors = write_block(tmp_path, layout="deepspec", dtype=torch.bfloat16, markov=("gated", 6), confidence="markov")
    for dtype in ("float32", "float16", "bfloat16"):
        head, kind = load_block(tmp_path, target_config(), dtype), getattr(torch, dtype)  # type: ignore[arg-type]
        assert {p.dtype for p in head.parameters()} == {kind}
        assert all(p.is_contiguous() and not p.requires_grad and p.device.type == "cpu" for p in head.parameters())
        assert torch.equal(head.layers[0].q.weight, tensors[Q].T.to(kind))  # type: ignore[union-attr]
        assert head.markov is not None
        assert head.embedding is not None
        assert torch.equal(head.embedding, tensors["embed_tokens.weight"].to(kind))
        assert torch.equal(head.markov.embedding, tensors[W1].to(kind))
        assert torch.equal(head.markov.output.weight, tensors[W2].T.to(kind))
        assert torch.equal(head.target_ids, torch.arange(VOCAB))
        assert not head.training


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deferred_head_reads_what_a_loaded_one_has(layout: Layout, tmp_path: Path) -> None:
    dspark = layout in ("deepspec", "speculators-dspark")
    write_block(
        tmp_path,
        layout=layout,
        bias=True,
        markov=("rnn", 6) if dspark else None,
        confidence="markov" if dspark else None,
        draft_vocab=25 if layout.startswith("speculators") else None,
    )
    loaded, unread = (read(tmp_path, target_config(), "bfloat16") for read in (load_block, defer_block))
    stored = deferred(unread)
    parameters = dict(loaded.named_parameters())
    assert stored.keys() == parameters.keys()
    assert all(torch.equal(tensor.read(), parameters[name]) for name, tensor in stored.items())
    assert torch.equal(unread.target_ids, loaded.target_ids)
    assert unread.config == loaded.config
    assert not unread.training


def test_target_ids_come_from_the_map_and_what_speculators_trains_against_is_let_pass(tmp_path: Path) -> None:
    tensors = write_block(tmp_path, layout="speculators-dspark", draft_vocab=25, markov=("vanilla", 6))
    assert (tensors[W1].shape, tensors[W2].shape) == ((VOCAB, 6), (25, 6))
    of_training = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.zeros(25, HIDDEN)}
    save_file(tensors | of_training, tmp_path / SAFETENSORS)
    head = load_block(tmp_path, target_config())
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"].T)
    assert head.target_ids.dtype == torch.int64
    assert torch.equal(head.target_ids, tensors["t2d"].nonzero().flatten())
    change(tmp_path, lambda stored: [stored.pop("d2t"), stored.pop("t2d")])
    refused(tmp_path, "tensor 'd2t' is missing", "draft vocabulary (25)", "target's (60)")


HEADS = {"markov": ("rnn", 6), "confidence": "markov"}
SPECULATORS = "speculators-dspark"
CASES: list[tuple[str, str, tuple[int, ...] | None, tuple[str, ...]]] = [
    ("zlab", UP, None, (f"{SAFETENSORS}: tensor '{UP}' is missing", "shape [", "complete checkpoint")),
    *((layout, name, None, (f"tensor '{name}' is missing",)) for layout, name in (
        (SPECULATORS, "lm_head.weight"), (SPECULATORS, W2), ("deepspec", "embed_tokens.weight"), ("deepspec", W1),
        ("deepspec", "confidence_head.proj.weight"),
    )),
    *((layout, name, (32,), (f"tensor '{name}' is unexpected", "head in ", "config.json")) for layout, name in (
        ("zlab", "layers.0.self_attn.q_proj.bias"), ("zlab", "embed_tokens.weight"), ("jetspec", "d2t"),
        ("deepspec", "verifier_norm.weight"), ("speculators-dflash", W1),
    )),
    *((SPECULATORS, name, shape, (f"tensor '{name}' has shape {list(shape)}", f"asks for {wanted}"))
      for name, shape, wanted in (
        ("fc.weight", (16, 32), "[16, 48]"), (W1, (25, 6), "[60, 6]"), (W2, (60, 6), "[25, 6]"),
        ("markov_head.joint_proj.weight", (18, 22), "[18, 28]"), ("confidence_head.proj.weight", (1, 16), "[1, 22]"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "name", "edit", "words"), CASES)
def test_what_is_wrong_with_a_tensor_is_named(
    layout: Layout, name: str, edit: tuple[int, ...] | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    heads: Any = HEADS if layout in ("deepspec", SPECULATORS) else {}
    write_block(tmp_path, layout=layout, draft_vocab=25 if layout == SPECULATORS else None, **heads)
    if edit is None:
        change(tmp_path, lambda tensors: tensors.pop(name))
    else:
        change(tmp_path, lambda tensors: tensors.update({name: torch.zeros(edit)}))
    refused(tmp_path, *words)


def test_pickled_weights_and_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """speculators leaves copies of the target's weights at NaN until it has loaded them."""
    write_block(tmp_path, layout="speculators-dflash")
    change(tmp_path, lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' holds values that are not finite in float32"):
        load_block(tmp_path, target_config())
    (tmp_path / SAFETENSORS).rename(tmp_path / PICKLED)
    refused(tmp_path, f"{tmp_path} holds {PICKLED} but no {SAFETENSORS}; pickled weights are not read")


FROM_ANCHOR = {"deepspec", "speculators-dspark"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_geometry(layout: Layout, tmp_path: Path) -> None:
    dspark = layout in FROM_ANCHOR
    write_block(
        tmp_path,
        layout=layout,
        layers=3,
        kv_heads=1,
        bias=True,
        block_size=7,
        markov=("gated", 6) if dspark else None,
        confidence="markov" if dspark else None,
    )
    config = read_block_config(tmp_path, target_config())
    assert config == BlockConfig(
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=40,
        num_layers=3,
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        rope_scaling=RopeScaling(),
        attention_bias=True,
        vocab_size=60,
        draft_vocab_size=60,
        block_size=7,
        sample_from_anchor=dspark,
        causal=layout == "jetspec",
        mask_token_id=MASK,
        markov=Markov("gated", 6) if dspark else None,
        confidence=Confidence.HIDDEN_AND_MARKOV if dspark else Confidence.NONE,
        own_embedding=layout not in ("zlab", "jetspec"),
        own_lm_head=layout not in ("zlab", "jetspec"),
        taps=Taps((2, 4, 7), config.taps.reason),
    )
    assert config.drafted == (7 if dspark else 6)


@pytest.mark.parametrize(
    ("layout", "streams", "reason"),
    [
        *((layout, streams, reason) for layout in ("zlab", "jetspec", "deepspec") for streams, reason in (
            ((2, 5, 7), "target_layer_ids [1, 4, 6], layers whose output is read"), ((0, 4), "[-1, 3]"),
        )),
        ("zlab", (7, 2, 4), "[6, 1, 3]"),  # the order is that of the concatenation
        # speculators names the layer that a stream enters, with any first id.
        *((layout, streams, "aux_hidden_state_layer_ids [") for layout in ("speculators-dflash", "speculators-dspark")
          for streams in ((1, 4, 6), (0, 3))),
    ],
)  # fmt: skip
def test_taps_are_counted_as_each_project_does(
    layout: Layout, streams: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    write_block(tmp_path, layout=layout, streams=streams)
    taps = read_block_config(tmp_path, target_config()).taps
    assert taps.layers == streams
    assert reason in taps.reason


@pytest.mark.parametrize(("layers", "expected"), [(1, (7,)), (2, (2, 10)), (3, (2, 6, 10)), (5, (2, 4, 6, 8, 10))])
def test_zlabs_default_taps_are_one_for_each_draft_layer(
    layers: int, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write_block(tmp_path, layers=layers, streams=expected, num_target_layers=12)
    change_config(tmp_path, dflash_config={"target_layer_ids": None})
    taps = read_block_config(tmp_path, target_config(layers=12)).taps
    assert taps.layers == expected
    assert taps.reason.endswith("z-lab's default: config.json names none")


NESTED, DECODER = "dflash_config", "transformer_layer_config"
TYPE, ABOUT = "speculators_model_type", "speculators_config"
FP8 = {"quantization_config": {"quant_method": "fp8"}}
UNKNOWN = "a key that is not known here and could change what the drafter computes"
GEOMETRY: list[tuple[dict[str, object], str]] = [
    ({"model_type": "gemma3"}, "model_type is 'gemma3'; the layers of"),
    ({"hidden_size": 32}, "hidden_size is 32, but the target's is 16; give a drafter that was trained for"),
    ({"vocab_size": 61}, "vocab_size is 61, but the target's is 60; give a drafter that was trained for this"),
    ({"use_sliding_window": True}, "use_sliding_window must be False, found True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "found 'sliding_attention'"),
    ({"intermediate_size": 48}, "asks for [16, 48]"),
    ({"num_hidden_layers": 3}, "tensor 'layers.2."),
    ({"attention_bias": True}, "bias'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
]
DFLASH, DSPARK = "speculators-dflash", "speculators-dspark"
CONFIGS: list[tuple[str, dict[str, object], str]] = [
    *(("zlab", edit, words) for edit, words in GEOMETRY),
    *((DSPARK, {DECODER: edit}, words) for edit, words in GEOMETRY[:4]),
    ("zlab", FP8, "this is an FP8 checkpoint (quantization_config)"),
    *((layout, {"embedding_scale": 2.0}, f"embedding_scale is 2.0, {UNKNOWN}") for layout in LAYOUTS),
    *(("zlab", {NESTED: {"target_layer_ids": ids}}, f"{NESTED}.target_layer_ids must be different layers of the target "
       f"from -1 to 6, found {ids}; the stream after the last layer") for ids in ([], [1, 1], [1, 7])),
    *((DFLASH, {"aux_hidden_state_layer_ids": ids}, "must be different layers of the target from 0 to 7")
      for ids in ([-1, 3], [1, 8])),
    ("zlab", {"architectures": ["Gemma4DSparkModel"]}, "architectures is ['Gemma4DSparkModel']"),
    ("zlab", {"architectures": ["Qwen3ForCausalLM"], NESTED: None}, "is no block drafter that is read here"),
    ("zlab", {"architectures": None, NESTED: None}, "expected speculators_model_type (speculators)"),
    (DFLASH, {TYPE: "mtp"}, f"{TYPE} is 'mtp'; block drafters of speculators are 'dflash'"),
    ("zlab", {NESTED: {"attention_sinks": True}}, f"{NESTED}.attention_sinks is True, {UNKNOWN}"),
    (DSPARK, {DECODER: {"attention_sinks": True}}, f"{DECODER}.attention_sinks is True, {UNKNOWN}"),
    ("zlab", {"block_size": 1}, "block_size is 1; such a block drafts nothing below 2"),
    ("zlab", {"num_target_layers": 36}, "num_target_layers is 36, but the target's is 8"),
    ("zlab", {NESTED: {"block_size": 6}}, f"block_size is 5 and {NESTED}.block_size is 6; remove the wrong one"),
    ("zlab", {NESTED: {"target_hidden_size": 32}}, "target_hidden_size is 32 and hidden_size is 16; heads of another"),
    ("deepspec", {"mask_token_id": 60}, "mask_token_id must be a token from 0 to 59, found 60"),
    ("deepspec", {"markov_rank": 6, "markov_head_type": "lstm"}, "must be 'vanilla', 'gated' or 'rnn', found 'lstm'"),
    ("deepspec", {"markov_rank": 6}, "markov_head_type is missing, and markov_rank is not 0"),
    ("deepspec", {"enable_confidence_head": True, "confidence_head_with_markov": None}, "with_markov is missing; give"),
    ("deepspec", {"enable_confidence_head": True, "confidence_head_with_markov": True}, "is on, but markov_rank is 0"),
    (DFLASH, {"draft_vocab_size": 61}, "draft_vocab_size 61 is greater than vocab_size 60"),
    (DFLASH, {ABOUT: {"algorithm": "eagle3"}}, f"{ABOUT}.algorithm is 'eagle3' and {TYPE} is 'dflash'"),
    (DFLASH, {ABOUT: {"proposal_methods": [{"speculative_tokens": 5}]}},
     "proposal_methods[0].speculative_tokens is 5, but a block of 5 drafts 4, as sample_from_anchor is off"),
    (DSPARK, {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False},
     "markov_head_type is 'rnn' and sample_from_anchor is off; the state of such a head also passes through"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "edit", "words"), CONFIGS)
def test_what_is_wrong_is_named(layout: Layout, edit: dict[str, object], words: str, tmp_path: Path) -> None:
    write_block(tmp_path, layout=layout)
    change_config(tmp_path, **edit)
    refused(tmp_path, str(tmp_path), words)


def test_keys_that_may_be_absent_or_elsewhere(tmp_path: Path) -> None:
    """The block's size is within `dflash_config` in newer heads of z-lab; DSpark's absent keys are speculators'."""
    write_block(tmp_path / "dspark", layout="speculators-dspark", markov=("vanilla", 256), confidence="markov")
    absent = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    change_config(tmp_path / "dspark", **dict.fromkeys(absent))
    config = load_block(tmp_path / "dspark", target_config()).config
    assert (config.markov, config.confidence) == (Markov("vanilla", 256), Confidence.HIDDEN_AND_MARKOV)
    write_block(tmp_path)
    change_config(tmp_path, dflash_config={"block_size": 5}, architectures=None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"embedding_scale": None}))  # nothing in it
    assert read_block_config(tmp_path, target_config()).block_size == 5
    change_config(tmp_path, dflash_config={"block_size": 9}, block_size=None)
    assert read_block_config(tmp_path, target_config()).block_size == 9


@pytest.mark.parametrize(
    ("layout", "settings", "drafted"),
    [
        ("deepspec", {"block_size": 1}, 1),
        ("speculators-dflash", {}, 4),
        ("speculators-dspark", {}, 5),
        ("speculators-dflash", {"sample_from_anchor": True}, 5),
        ("speculators-dspark", {"sample_from_anchor": False}, 4),
    ],
)
def test_sampling_from_the_anchor_drafts_one_more_and_is_dsparks_default(
    layout: Layout, settings: dict[str, Any], drafted: int, tmp_path: Path
) -> None:
    about = {"speculators_config": None} if layout.startswith("speculators") else {}
    write_block(tmp_path, layout=layout, **settings, **about)
    assert read_block_config(tmp_path, target_config()).drafted == drafted


def test_layers_of_a_llama_target_are_qwen3s(tmp_path: Path) -> None:
    """speculators keeps the target's kind of configuration; head_dim is then by default what Llama's is."""
    geometry = {"model_type": "llama", "head_dim": None, "pretraining_tp": 1, "mlp_bias": False}
    write_block(tmp_path, layout="speculators-dflash", head_dim=4, decoder=geometry)
    head = load_block(tmp_path, target_config())
    assert head.config.head_dim == 4
    assert head.layers[0].q_norm is not None
    write_block(tmp_path, decoder={"model_type": "llama"})
    with pytest.raises(CheckpointError, match=r"model_type is .llama.; the layers of .* are those of qwen3"):
        read_block_config(tmp_path, target_config())
