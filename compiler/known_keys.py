"""Keys of a drafter's config.json, read strictly: one that is not known could change what a drafter computes.

Each layout lists its own keys. Here are those of the layers, those without effect, and what all layouts of speculators
(vllm-project/speculators) have.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from outrider.compiler.models.config_reader import Keys
from outrider.compiler.models.quantization import SETTINGS

TYPE, DECODER = "speculators_model_type", "transformer_layer_config"
"""Keys of speculators: the kind of drafter, and its layers."""

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
    # The tensors show whether the output weights are the embedding.
    "tie_word_embeddings",
}  # fmt: skip
WINDOW = {"sliding_window", "max_window_layers", "sliding_window_non_causal"}
"""Keys beside a geometry whose layers do not slide: their window says nothing."""


class StrictKeys(Keys, extra="forbid"):
    """Keys of a drafter; those of its layers and of its packing are read elsewhere."""

    ignored = HARMLESS | set(SETTINGS)


class _About(Keys):
    algorithm: str | None = None
    proposal_methods: list[dict[str, Any]] = []  # noqa: RUF012  Pydantic copies it


class SpeculatorsKeys(StrictKeys):
    """Keys of every layout of speculators: the kind of drafter, its layers, and how it drafts after which target."""

    speculators_model_type: str
    transformer_layer_config: dict[str, Any]
    speculators_config: _About = _About()

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        named = self.speculators_config.algorithm
        if named not in (None, self.speculators_model_type):
            kind = self.speculators_model_type
            raise ValueError(f"speculators_config.algorithm is {named!r} and {TYPE} is {kind!r}; remove the wrong one")
        return self
