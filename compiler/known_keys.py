"""Keys of a drafter's config.json, read strictly: one that is not known could change what a drafter computes.

Each layout lists its own keys. Here are those of the layers, those without effect, and what all layouts of speculators
(vllm-project/speculators) have.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from outrider.plans.errors import CheckpointError

TYPE, DECODER, ABOUT = "speculators_model_type", "transformer_layer_config", "speculators_config"
"""Keys of speculators: the kind of drafter, its layers, and how and behind which target it drafts."""

GEOMETRY = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "layer_types",
    "use_sliding_window", "partial_rotary_factor", "rope_theta", "rope_scaling", "rope_parameters",
    "max_position_embeddings", "original_max_position_embeddings",
}  # fmt: skip
HARMLESS = {
    # What the values are called or stored as, and by which version of what.
    "architectures", "auto_map", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "transformers_version",
    "speculators_version", "has_no_defaults_at_init",
    # Training, and running in PyTorch.
    "initializer_range", "attention_dropout", "use_cache", "_attn_implementation", "attn_implementation",
    "attn_implementation_autoset", "_attn_implementation_autoset", "num_anchors", "gradient_checkpointing",
    "return_dict", "output_attentions", "output_hidden_states", "pretraining_tp", "chunk_size_feed_forward",
    "is_encoder_decoder", "problem_type", "id2label", "label2id", "embed_requires_grad",
    # Tokens that the target knows itself.
    "bos_token_id", "eos_token_id", "pad_token_id",
    # Whether the output weights are the embedding is told by the tensors.
    "tie_word_embeddings",
}  # fmt: skip
WINDOW = {"sliding_window", "max_window_layers", "sliding_window_non_causal"}
"""Keys beside a geometry whose layers do not slide: their window says nothing."""


def refuse_unknown(file: Path, place: str, raw: Mapping[str, Any], known: Set[str]) -> None:
    """Raise `CheckpointError` for the first key with a value that is not known; a null says nothing."""
    key = next((key for key, value in raw.items() if key not in known and value is not None), None)
    if key is not None:
        raise CheckpointError(
            f"{file}: {place}{key} is {raw[key]!r:.60}, a key that is not known here and could change what the drafter "
            "computes; remove the key if it does not"
        )


def object_of(file: Path, raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the JSON object `key` of `raw`. Raises `CheckpointError` for another value, and where there is none."""
    value = raw.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {key} must be a JSON object, found {value!r:.60}")
    return value


def read_about(file: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return speculators' `speculators_config`; empty where there is none.

    Raises `CheckpointError` where it tells of another kind of drafter than the key beside it.
    """
    if raw.get(ABOUT) is None:
        return {}
    about = object_of(file, raw, ABOUT)
    if about.get("algorithm") not in (None, raw[TYPE]):
        raise CheckpointError(
            f"{file}: {ABOUT}.algorithm is {about['algorithm']!r} and {TYPE} is {raw[TYPE]!r}; remove the wrong one"
        )
    return about
