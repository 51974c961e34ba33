"""Load a block drafter's checkpoint folder into a `BlockHead`, as strictly as a decoder's.

The layouts of z-lab, JetSpec, DeepSpec and speculators have the same tensor names. They differ in config.json
(`block_layouts`) and in the tensors that are there: z-lab and JetSpec leave the embedding and the output weights to
the target; DeepSpec stores copies of both, frozen in training, so that both may be absent and the target's serve;
speculators stores output weights of the draft vocabulary, the map of that vocabulary, and mostly the embedding.
In all of them projections may be packed, as a decoder's may be (`formats/packed_tensors`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.compiler.block_layouts import Layout, layout_of, read_layout
from outrider.compiler.checkpoint import stored_name
from outrider.compiler.deferred import defer
from outrider.compiler.draft_vocabulary import map_slots, read_target_ids
from outrider.compiler.eagle3_speculators import tensors_of_training
from outrider.compiler.formats.packed_tensors import as_described
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.config import DecoderConfig, WeightType
from outrider.compiler.models.config_reader import read_json
from outrider.compiler.slots import Slot, check_tensors, fill, slots
from outrider.compiler.tensor_source import TensorSource
from outrider.compiler.weights import Weights, check_folder

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_NAMES = {
    "context_norm.weight": "hidden_norm.weight",
    "markov.embedding": "markov_head.markov_w1.weight",
    "markov.output.weight": "markov_head.markov_w2.weight",
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in {
            "fc": "fc",
            "markov.gate": "markov_head.gate_proj",
            "markov.joint": "markov_head.joint_proj",
            "confidence_head": "confidence_head.proj",
        }.items()
        for kind in ("weight", "bias")
    },
}


def read_block_config(path: Path, target: DecoderConfig) -> BlockConfig:
    """Read the geometry of the head in the checkpoint folder `path`; check it against `target` and all tensor headers.

    Raises `CheckpointError`.
    """
    return _examine(path, target).config


def load_block(path: Path, target_config: DecoderConfig, dtype: WeightType = "float32") -> BlockHead:
    """Load the head with all weights in `dtype`, on the CPU, frozen and in eval mode.

    Projections are transposed to `[in, out]`; `embedding` and `lm_head` are None where the target's serve. Raises
    `CheckpointError` naming the file, the key, the expectation and the finding.
    """
    head = _examine(path, target_config)
    values: dict[str, Tensor] = fill(head.tensors, head.wanted, dtype)
    head.module.load_state_dict(values | {"target_ids": head.target_ids}, assign=True)
    return head.module.requires_grad_(False).eval()


def defer_block(path: Path, target_config: DecoderConfig, dtype: WeightType = "float32") -> BlockHead:
    """Return the head of `load_block` without values, for graphs that read them as they are written.

    Raises `CheckpointError` as `load_block`, but for values that are not finite: reading them does.
    """
    head = _examine(path, target_config)
    defer(head.module, head.tensors, head.wanted, dtype)
    head.module.target_ids = head.target_ids
    return head.module.eval()


class _Head(NamedTuple):
    """A checkpoint that passed all checks and whose weights are still to be read; `module` has no weights yet."""

    config: BlockConfig
    module: BlockHead
    tensors: TensorSource
    wanted: dict[str, Slot]
    target_ids: Tensor


def _examine(path: Path, target: DecoderConfig) -> _Head:
    check_folder(path)
    file = path / "config.json"
    raw = read_json(file)
    layout = layout_of(file, raw)
    stored = Weights(path)
    tensors = as_described(stored, raw, file)
    of_target = {Layout.ZLAB: (), Layout.DEEPSPEC: (EMBEDDING, LM_HEAD), Layout.SPECULATORS: (EMBEDDING,)}[layout]
    own_embedding = any(name in tensors.found for name in of_target)
    config = read_layout(file, raw, layout, target, own_embedding)
    with torch.device("meta"):
        module = BlockHead(config)
    wanted = slots(module, stored_block_name)
    optional = _beside(config) if layout is Layout.SPECULATORS else {}
    check_tensors(tensors, stored.source, file, layout.value, wanted, optional)
    target_ids = read_target_ids(tensors, stored.source, config.draft_vocab_size, config.vocab_size)
    return _Head(config, module, tensors, wanted, target_ids)


def _beside(config: BlockConfig) -> dict[str, Slot]:
    """Return the tensors that speculators may store beside the head's: the vocabulary map, and training's."""
    draft = config.draft_vocab_size
    return map_slots(draft, config.vocab_size) | tensors_of_training(draft, config.target_hidden_size)


def stored_block_name(parameter: str) -> str:
    """Return the name of a `BlockHead`'s parameter in a checkpoint."""
    return _NAMES.get(parameter) or stored_name("qwen3", parameter).removeprefix("model.")
