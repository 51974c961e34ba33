"""Rotary tables against transformers' own, for every scaling and both spellings in config.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from outrider.compiler.models.rope import RopeScaling, rope_tables
from outrider.compiler.opening import read_config
from outrider.plans.errors import CheckpointError

POSITIONS, THETA = 4096, 500000.0
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn-original-from-maximum": {"rope_type": "yarn", "factor": 2.0},
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-not-truncated": YARN | {"truncate": False},
    "yarn-ramp-reversed": YARN | {"original_max_position_embeddings": 4},
}


SIZES: dict[str, object] = {
    "model_type": "qwen3", "vocab_size": 10, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": POSITIONS,
}  # fmt: skip


def write_config(folder: Path, **keys: object) -> None:
    (folder / "config.json").write_text(json.dumps(SIZES | keys))


def compare_with_transformers(folder: Path) -> None:
    """The tables of the config.json in `folder` are those of transformers, at every position."""
    config = read_config(folder)
    cos, sin = rope_tables(config.rope_theta, config.head_dim, POSITIONS, config.rope_scaling)
    oracle = Qwen3RotaryEmbedding(Qwen3Config.from_pretrained(folder))

    expected_cos, expected_sin = oracle(torch.zeros(1), torch.arange(POSITIONS)[None])
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (POSITIONS, 32)
    # An angle near 4096 is known to 2.4e-4 in float32, so this is as close as two float32 tables can be asked to lie.
    np.testing.assert_allclose(cos, expected_cos[0, :, :32].numpy(), rtol=0, atol=1e-3)
    np.testing.assert_allclose(sin, expected_sin[0, :, :32].numpy(), rtol=0, atol=1e-3)
    # The first positions hold the frequencies and the magnitude themselves.
    np.testing.assert_allclose(cos[:2], expected_cos[0, :2, :32].numpy(), rtol=1e-6)
    np.testing.assert_allclose(sin[:2], expected_sin[0, :2, :32].numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers_in_both_spellings(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, rope_parameters=SCALINGS[name] | {"rope_theta": THETA})
    compare_with_transformers(tmp_path)
    write_config(tmp_path, rope_theta=THETA, rope_scaling=None if name == "default" else SCALINGS[name])
    compare_with_transformers(tmp_path)


TRAINED = "original_max_position_embeddings"
PLAIN = {"rope_type": "default", "rope_theta": THETA}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_parameters": YARN | {"rope_theta": THETA}, "rope_scaling": YARN | {"rope_theta": THETA}},
        {"rope_parameters": YARN | {"rope_theta": THETA}, "rope_scaling": YARN, "rope_theta": THETA},
        {"rope_parameters": None, "rope_scaling": YARN | {"rope_theta": THETA}},
        {"rope_theta": THETA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}, TRAINED: 512},
        {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ],
)
def test_keys_that_agree_are_read_as_by_transformers(keys: dict[str, object], tmp_path: Path) -> None:
    write_config(tmp_path, **keys)
    compare_with_transformers(tmp_path)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rope_parameters": PLAIN, "rope_scaling": YARN}, "rope_parameters and rope_scaling contradict each other"),
        (
            {"rope_parameters": PLAIN, "rope_scaling": YARN | {"rope_theta": 1e4}},
            "rope_parameters.rope_theta is 500000.0 and rope_scaling.rope_theta is 10000.0; remove the wrong one",
        ),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "its older spelling 'type' is"),
        ({"rope_scaling": YARN, TRAINED: 64}, f"rope_scaling.{TRAINED} is 512 and {TRAINED} is 64"),
        ({"rope_parameters": {"full_attention": PLAIN}}, "rope_parameters is by kind of layer, which Qwen3 models do"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; Qwen3 models rotate whole heads"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number, found nan"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], sentence: str, tmp_path: Path) -> None:
    write_config(tmp_path, **keys)
    with pytest.raises(CheckpointError) as refused:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(refused.value)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; known kinds: default, linear"),
        ({"rope_type": "linear"}, "needs a 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor must be at least 1e-06"),
        (YARN | {"beta_fast": 10**4000}, "beta_fast must be a number, found 1000"),
        ({"rope_type": "linear", "factor": 2.0, "short_factor": [1]}, "unknown key 'short_factor'; known keys"),
        ({"rope_type": "yarn", "factor": 2.0}, "needs 'original_max_position_embeddings'"),
        (SCALINGS["llama3"] | {"high_freq_factor": 1.0}, "must be greater than 'low_freq_factor'"),
    ],
)
def test_wrong_scaling_is_refused(scaling: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match="rope scaling") as refused:
        RopeScaling.from_huggingface(scaling)
    assert sentence in str(refused.value)


@given(
    theta=st.sampled_from([1.001, 10000.0, 1e12]),
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    numbers=st.fixed_dictionaries(
        {"factor": st.sampled_from([1e-6, 1.0, 1e12]), TRAINED: st.sampled_from([1, 10**12])},
        optional={
            "low_freq_factor": st.sampled_from([0, 1e-300, 9e5]),
            "high_freq_factor": st.sampled_from([1e-299, 1e-6, 1e6]),
            **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), st.sampled_from([1e-6, 1e6])),
            **dict.fromkeys(("mscale", "mscale_all_dim"), st.sampled_from([0, 1e-300, 1e6])),
            "truncate": st.booleans(),
        },
    ),
)
def test_every_setting_that_is_read_gives_numbers(theta: float, kind: str, numbers: dict[str, float]) -> None:
    """At the limits of each, and far inside."""
    try:
        scaling = RopeScaling.from_huggingface({"rope_type": kind, **numbers})
    except ValueError as refused:
        assert "greater than 'low_freq_factor'" in str(refused)  # noqa: PT017
        return
    for table in rope_tables(theta, 128, 4096, scaling):
        assert np.isfinite(table).all()


def test_unsupported_scaling_of_a_checkpoint_names_the_file_and_can_be_replaced(tmp_path: Path) -> None:
    write_config(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(CheckpointError, match=r"config\.json: rope scaling 'dynamic' is not supported"):
        read_config(tmp_path)
    linear = RopeScaling(kind="linear", factor=2.0)
    assert read_config(tmp_path, linear).rope_scaling == linear
