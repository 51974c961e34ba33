"""Small random checkpoints, written by transformers, which is the oracle of these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SIZES: dict[str, object] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def new_model(family: str, **sizes: object) -> PreTrainedModel:
    """A model of transformers, with weights that are still to be set."""
    config: PreTrainedConfig = CONFIG_MAPPING[family](**sizes)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    return model


MakeCheckpoint = Callable[..., PreTrainedModel]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """`make(family, dtype=..., max_shard_size=..., **config)` saves a random model to `tmp_path` and returns it."""

    def make(
        family: str = "llama", *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: object
    ) -> PreTrainedModel:
        generator = torch.Generator().manual_seed(0)
        model = new_model(family, **(SIZES | changes))
        for name, parameter in model.named_parameters():
            # Norms and biases too: at their initial 1 and 0 a mistake with them would not show. The scale makes
            # logits of a few units.
            centre, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.2)
            parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
        model = model.to(dtype).eval()
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        return model

    return make
