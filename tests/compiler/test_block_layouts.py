"""config.json of block drafters: which layout, which streams, how many tokens, and a sentence for what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.compiler.models.block_config import BlockConfig, Confidence, Markov
from outrider.compiler.models.eagle3_config import Taps
from outrider.compiler.models.rope import RopeScaling
from outrider.plans.errors import CheckpointError

from .block_heads import LAYOUTS, MASK, Layout, load_block, read_block_config, refused, write_block
from .eagle3_heads import change_config, target_config

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


def test_absent_architectures_and_unknown_keys_with_nothing_in_them_are_let_pass(tmp_path: Path) -> None:
    write_block(tmp_path)
    change_config(tmp_path, architectures=None)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"embedding_scale": None}))
    assert not read_block_config(tmp_path, target_config()).causal


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
CASES: list[tuple[str, dict[str, object], str]] = [
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


@pytest.mark.parametrize(("layout", "edit", "words"), CASES)
def test_what_is_wrong_is_named(layout: Layout, edit: dict[str, object], words: str, tmp_path: Path) -> None:
    write_block(tmp_path, layout=layout)
    change_config(tmp_path, **edit)
    refused(tmp_path, str(tmp_path), words)


def test_block_size_within_dflash_config(tmp_path: Path) -> None:
    """Where newer heads of z-lab have it."""
    write_block(tmp_path)
    change_config(tmp_path, dflash_config={"block_size": 5})
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


def test_absent_keys_of_a_dspark_head_mean_what_speculators_means(tmp_path: Path) -> None:
    write_block(tmp_path, layout="speculators-dspark", markov=("vanilla", 256), confidence="markov")
    absent = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    change_config(tmp_path, **dict.fromkeys(absent))
    config = load_block(tmp_path, target_config()).config
    assert (config.markov, config.confidence) == (Markov("vanilla", 256), Confidence.HIDDEN_AND_MARKOV)


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


def test_rope_in_the_spelling_of_transformers_5(tmp_path: Path) -> None:
    rope = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}
    write_block(tmp_path, layout="speculators-dflash", decoder=rope)
    assert read_block_config(tmp_path, target_config()).rope_theta == 7000
