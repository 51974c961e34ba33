"""config.json of block drafters: which layout, which streams, how many tokens, and a sentence for what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.compiler.block_checkpoint import load_block, read_block_config
from outrider.compiler.models.block_config import BlockConfig, Confidence, Markov
from outrider.compiler.models.eagle3_config import Taps
from outrider.compiler.models.rope import RopeScaling
from outrider.plans.errors import CheckpointError

from .block_heads import LAYOUTS, MASK, Layout, refused, write_block
from .eagle3_heads import change_config, target_config

FROM_ANCHOR = {"deepspec", "speculators-dspark"}


def change_part(folder: Path, part: str, **values: object) -> None:
    """Change an object in config.json; None removes a key."""
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    raw[part] = {key: value for key, value in (raw[part] | values).items() if value is not None}
    config.write_text(json.dumps(raw))


def remove_keys(folder: Path, *keys: str) -> None:
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in raw.items() if key not in keys}))


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


class TestTaps:
    @pytest.mark.parametrize("layout", ["zlab", "jetspec", "deepspec"])
    def test_layers_whose_output_is_read_are_one_more_each(self, layout: Layout, tmp_path: Path) -> None:
        write_block(tmp_path, layout=layout, streams=(2, 5, 7))
        config = json.loads((tmp_path / "config.json").read_text())
        assert config.get("target_layer_ids", config.get("dflash_config", {}).get("target_layer_ids")) == [1, 4, 6]
        taps = read_block_config(tmp_path, target_config()).taps
        assert taps.layers == (2, 5, 7)
        assert "target_layer_ids [1, 4, 6], layers whose output is read" in taps.reason

    @pytest.mark.parametrize("layout", ["zlab", "jetspec", "deepspec"])
    def test_minus_one_is_the_embedding(self, layout: Layout, tmp_path: Path) -> None:
        write_block(tmp_path, layout=layout, streams=(0, 4))
        assert "[-1, 3]" in read_block_config(tmp_path, target_config()).taps.reason
        assert read_block_config(tmp_path, target_config()).aux_layers == (0, 4)

    @pytest.mark.parametrize("layout", ["speculators-dflash", "speculators-dspark"])
    @pytest.mark.parametrize("streams", [(1, 4, 6), (2, 5, 7), (0, 3)])
    def test_speculators_names_the_layer_that_a_stream_enters_whatever_the_first_id(
        self, layout: Layout, streams: tuple[int, ...], tmp_path: Path
    ) -> None:
        write_block(tmp_path, layout=layout, streams=streams)
        taps = read_block_config(tmp_path, target_config()).taps
        assert taps.layers == streams
        assert "aux_hidden_state_layer_ids [" in taps.reason

    def test_the_order_is_that_of_the_concatenation(self, tmp_path: Path) -> None:
        write_block(tmp_path, streams=(7, 2, 4))
        assert read_block_config(tmp_path, target_config()).aux_layers == (7, 2, 4)

    @pytest.mark.parametrize(("layers", "expected"), [(1, (7,)), (2, (2, 10)), (3, (2, 6, 10)), (5, (2, 4, 6, 8, 10))])
    def test_zlabs_default_is_one_for_each_draft_layer(
        self, layers: int, expected: tuple[int, ...], tmp_path: Path
    ) -> None:
        write_block(tmp_path, layers=layers, streams=expected, num_target_layers=12)
        change_part(tmp_path, "dflash_config", target_layer_ids=None)
        taps = read_block_config(tmp_path, target_config(layers=12)).taps
        assert taps.layers == expected
        assert taps.reason.endswith("z-lab's default: config.json names none")

    @pytest.mark.parametrize("ids", [[], [1, 1], [-2, 3], [1, 7], [1, 3, "5"], [1, 3.0], 3, [True, 2]])
    def test_wrong_layers_that_are_left(self, ids: object, tmp_path: Path) -> None:
        write_block(tmp_path)
        change_part(tmp_path, "dflash_config", target_layer_ids=ids)
        refused(
            tmp_path,
            "dflash_config.target_layer_ids must be different layers of the target from -1 to 6",
            f"found {ids!r}; the stream behind the last layer",
        )
        write_block(tmp_path, layout="deepspec", target_layer_ids=ids)
        refused(tmp_path, "target_layer_ids must be different layers of the target from -1 to 6", f"found {ids!r}")

    @pytest.mark.parametrize("ids", [[], [1, 1], [-1, 3], [1, 8], 3])
    def test_wrong_layers_that_are_entered(self, ids: object, tmp_path: Path) -> None:
        write_block(tmp_path, layout="speculators-dflash", aux_hidden_state_layer_ids=ids)
        refused(tmp_path, "aux_hidden_state_layer_ids must be different layers of the target from 0 to 7")

    @pytest.mark.parametrize(
        ("layout", "key"),
        [("deepspec", "target_layer_ids"), ("speculators-dflash", "aux_hidden_state_layer_ids")],
    )
    def test_absent_layers(self, layout: Layout, key: str, tmp_path: Path) -> None:
        write_block(tmp_path, layout=layout)
        remove_keys(tmp_path, key)
        refused(tmp_path, f"{key} must be different layers", "found None")


class TestLayout:
    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ({"architectures": ["Gemma4DSparkModel"]}, "architectures is ['Gemma4DSparkModel']"),
            ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": None}, "dflash_config is absent"),
            ({"architectures": None, "dflash_config": None}, "expected speculators_model_type (speculators)"),
            ({"architectures": ["DFlashDraftModel"], "dflash_config": None}, "['DFlashDraftModel'] with dflash_config"),
        ],
    )
    def test_unknown(self, values: dict[str, object], sentence: str, tmp_path: Path) -> None:
        write_block(tmp_path)
        change_config(tmp_path, **values)
        refused(tmp_path, "config.json: is no block drafter that is read here", sentence)

    @pytest.mark.parametrize("kind", ["eagle3", "mtp", "peagle", 3])
    def test_of_speculators_that_is_no_block_drafter(self, kind: object, tmp_path: Path) -> None:
        write_block(tmp_path, layout="speculators-dflash", speculators_model_type=kind)
        refused(tmp_path, f"speculators_model_type is {kind!r}", "'dflash' and 'dspark'")

    def test_without_architectures(self, tmp_path: Path) -> None:
        write_block(tmp_path)
        remove_keys(tmp_path, "architectures")
        assert not read_block_config(tmp_path, target_config()).causal


class TestUnknownKeys:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_at_the_top(self, layout: Layout, tmp_path: Path) -> None:
        write_block(tmp_path, layout=layout, embedding_scale=2.0)
        refused(tmp_path, "config.json: embedding_scale is 2.0, a key that is not known here", "remove the key if it")

    @pytest.mark.parametrize(
        ("layout", "part"), [("zlab", "dflash_config"), ("speculators-dspark", "transformer_layer_config")]
    )
    def test_within(self, layout: Layout, part: str, tmp_path: Path) -> None:
        write_block(tmp_path, layout=layout)
        change_part(tmp_path, part, attention_sinks=True)
        refused(tmp_path, f"config.json: {part}.attention_sinks is True, a key that is not known here")

    @pytest.mark.parametrize(
        ("layout", "key", "value"),
        [
            ("zlab", "markov_rank", 6),
            ("zlab", "mask_token_id", 3),
            ("deepspec", "dflash_config", {"causal_head": True}),
            ("deepspec", "sample_from_anchor", False),
            ("deepspec", "draft_vocab_size", 25),
            ("speculators-dflash", "markov_rank", 6),
            ("speculators-dflash", "enable_confidence_head", True),
            ("speculators-dspark", "dflash_config", {"causal_head": True}),
        ],
    )
    def test_of_another_layout(self, layout: Layout, key: str, value: object, tmp_path: Path) -> None:
        write_block(tmp_path, layout=layout)
        change_config(tmp_path, **{key: value})
        refused(tmp_path, f"config.json: {key} is {value!r}, a key that is not known here")

    def test_with_nothing_in_them_are_let_pass(self, tmp_path: Path) -> None:
        write_block(tmp_path)
        change_config(tmp_path, embedding_scale=None)
        read_block_config(tmp_path, target_config())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'; the layers of"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_size": 32}, "hidden_size is 32, but the target's is 16; give a drafter that was trained for"),
        ({"vocab_size": 61}, "vocab_size is 61, but the target's is 60; give a drafter that was trained for this"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is on; sliding-window attention cannot be compiled"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'; only"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value_heads 2"),
        ({"head_dim": 7}, "head_dim is 7; rotary positions need an even head_dim"),
        ({"head_dim": 16}, "asks for"),
        ({"intermediate_size": 48}, "asks for [16, 48]"),
        ({"num_hidden_layers": 3}, "tensor 'layers.2."),
        ({"num_hidden_layers": 1}, "tensor 'layers.1."),
        ({"attention_bias": True}, "bias'"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, found 'yes'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_theta": -1}, "rope_theta must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_wrong_geometry_names_the_key(layout: Layout, values: dict[str, object], sentence: str, tmp_path: Path) -> None:
    write_block(tmp_path, layout=layout)
    if layout.startswith("speculators"):
        change_part(tmp_path, "transformer_layer_config", **values)
    else:
        change_config(tmp_path, **values)
    refused(tmp_path, str(tmp_path), sentence)


@pytest.mark.parametrize(
    ("layout", "values", "sentence"),
    [
        ("zlab", {"block_size": 0}, "block_size must be a positive integer, found 0"),
        ("zlab", {"block_size": None}, "block_size must be a positive integer, found None"),
        ("zlab", {"block_size": 2000}, "block_size is 2000; at most 1024"),
        ("zlab", {"block_size": 1}, "block_size is 1; such a block drafts nothing below 2"),
        ("zlab", {"dflash_config": [1]}, "dflash_config must be a JSON object, found [1]"),
        ("zlab", {"num_target_layers": 36}, "num_target_layers is 36, but the target has 8 layers"),
        *(
            (
                layout,
                {"quantization_config": {"quant_method": "fp8"}},
                "this is an FP8 checkpoint (quantization_config)",
            )
            for layout in LAYOUTS
        ),
        (
            "speculators-dflash",
            {"compression_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
            "compression_config.format is 'marlin-24', and of compressed-tensors checkpoints only those are read",
        ),
        ("deepspec", {"block_size": "7"}, "block_size must be a positive integer, found '7'"),
        ("deepspec", {"num_target_layers": 36}, "num_target_layers is 36, but the target has 8 layers"),
        ("deepspec", {"mask_token_id": 60}, "mask_token_id must be a token from 0 to 59, found 60"),
        ("deepspec", {"mask_token_id": None}, "mask_token_id must be a token from 0 to 59, found None"),
        ("deepspec", {"markov_rank": -1}, "markov_rank must be a number from 0 to 65536, found -1"),
        ("deepspec", {"markov_rank": None}, "markov_rank must be a number from 0 to 65536, found None"),
        (
            "deepspec",
            {"markov_rank": 6, "markov_head_type": "lstm"},
            "markov_head_type is 'lstm'; known kinds: vanilla",
        ),
        ("deepspec", {"markov_rank": 6}, "markov_head_type is None; known kinds: vanilla, gated, rnn"),
        ("deepspec", {"enable_confidence_head": None}, "enable_confidence_head must be true or false, and is absent"),
        ("deepspec", {"enable_confidence_head": 1}, "enable_confidence_head must be true or false, found 1"),
        (
            "deepspec",
            {"enable_confidence_head": True, "confidence_head_with_markov": None},
            "confidence_head_with_markov must be true or false, and is absent",
        ),
        (
            "deepspec",
            {"enable_confidence_head": True, "confidence_head_with_markov": True},
            "confidence_head_with_markov is on, but markov_rank is 0",
        ),
        ("speculators-dflash", {"transformer_layer_config": None}, "transformer_layer_config must be a JSON object"),
        ("speculators-dflash", {"draft_vocab_size": 61}, "draft_vocab_size 61 is greater than vocab_size 60"),
        ("speculators-dflash", {"draft_vocab_size": None}, "draft_vocab_size must be a positive integer, found None"),
        ("speculators-dflash", {"mask_token_id": None}, "mask_token_id must be a token from 0 to 59, found None"),
        ("speculators-dflash", {"sample_from_anchor": 1}, "sample_from_anchor must be true or false, found 1"),
        ("speculators-dflash", {"target_hidden_size": 32}, "target_hidden_size is 32 and hidden_size is 16"),
        ("speculators-dflash", {"speculators_config": 3}, "speculators_config must be a JSON object, found 3"),
        (
            "speculators-dflash",
            {"speculators_config": {"algorithm": "eagle3"}},
            "speculators_config.algorithm is 'eagle3' and speculators_model_type is 'dflash'",
        ),
        (
            "speculators-dflash",
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}},
            "proposal_methods[0].speculative_tokens is 5, but a block of 5 drafts 4, as sample_from_anchor is off",
        ),
        (
            "speculators-dspark",
            {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False},
            "markov_head_type is 'rnn' and sample_from_anchor is off; the state of such a head also passes through",
        ),
    ],
)
def test_wrong_drafting_names_the_key(layout: Layout, values: dict[str, object], sentence: str, tmp_path: Path) -> None:
    write_block(tmp_path, layout=layout)
    change_config(tmp_path, **values)
    refused(tmp_path, "config.json: ", sentence)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"mask_token_id": True}, "dflash_config.mask_token_id must be a token from 0 to 59, found True"),
        ({"mask_token_id": None}, "dflash_config.mask_token_id must be a token from 0 to 59, found None"),
        ({"causal_head": "yes"}, "causal_head must be true or false, found 'yes'"),
        ({"block_size": 6}, "block_size is 5 and dflash_config.block_size is 6; remove the wrong one"),
        ({"target_hidden_size": 32}, "dflash_config.target_hidden_size is 32 and hidden_size is 16; heads of another"),
    ],
)
def test_wrong_dflash_config_names_the_key(values: dict[str, object], sentence: str, tmp_path: Path) -> None:
    write_block(tmp_path)
    change_part(tmp_path, "dflash_config", **values)
    refused(tmp_path, "config.json: ", sentence)


def test_block_size_within_dflash_config(tmp_path: Path) -> None:
    """Where newer heads of z-lab have it."""
    write_block(tmp_path)
    change_part(tmp_path, "dflash_config", block_size=5)
    assert read_block_config(tmp_path, target_config()).block_size == 5
    change_part(tmp_path, "dflash_config", block_size=9)
    remove_keys(tmp_path, "block_size")
    assert read_block_config(tmp_path, target_config()).block_size == 9


def test_a_block_of_one_drafts_one_from_the_anchor(tmp_path: Path) -> None:
    write_block(tmp_path, layout="deepspec", block_size=1)
    assert read_block_config(tmp_path, target_config()).drafted == 1


def test_sampling_from_the_anchor_is_speculators_default_for_dspark_alone(tmp_path: Path) -> None:
    for layout, drafted in (("speculators-dflash", 4), ("speculators-dspark", 5)):
        write_block(tmp_path, layout=layout, speculators_config=None)  # type: ignore[arg-type]
        assert read_block_config(tmp_path, target_config()).drafted == drafted
    write_block(tmp_path, layout="speculators-dflash", sample_from_anchor=True)
    assert read_block_config(tmp_path, target_config()).drafted == 5
    write_block(tmp_path, layout="speculators-dspark", sample_from_anchor=False, speculators_config=None)
    assert read_block_config(tmp_path, target_config()).drafted == 4


def test_absent_keys_of_a_dspark_head_mean_what_speculators_means(tmp_path: Path) -> None:
    write_block(tmp_path, layout="speculators-dspark", markov=("vanilla", 256), confidence="markov")
    remove_keys(tmp_path, "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
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
