"""Load an EAGLE3 head's checkpoint folder into an `Eagle3Head`, as strictly as a decoder's.

The layouts of SafeAILab, SpecForge and AngelSlim have the same tensor names; they differ in the file
(`pytorch_model.bin` or safetensors) and in the parts that may be absent: the embedding, the vocabulary map, keys of
`config.json`. Geometry that the tensors show is read from their shapes. speculators' layout has other names
(`eagle3_speculators`). In all of them projections may be packed, as a decoder's may be (`formats/packed_tensors`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.compiler.deferred import defer
from outrider.compiler.draft_vocabulary import map_slots, read_target_ids
from outrider.compiler.eagle3_speculators import KIND as OF_SPECULATORS
from outrider.compiler.eagle3_speculators import (
    flattened,
    is_speculators,
    read_speculators_taps,
    speculators_name,
    tensors_of_training,
)
from outrider.compiler.eagle3_taps import read_taps
from outrider.compiler.formats.packed_tensors import as_described
from outrider.compiler.models.config import DecoderConfig, WeightType
from outrider.compiler.models.config_layers import read_rope, refuse_unsupported
from outrider.compiler.models.config_reader import Reader, read_json
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import TAPS, Eagle3Config, Eagle3Overrides, Taps
from outrider.compiler.slots import Slot, check_tensors, fill, slots
from outrider.compiler.tensor_source import TensorSource
from outrider.compiler.weights import Weights, check_folder
from outrider.plans.errors import CheckpointError

KIND = "an EAGLE3 head as SafeAILab, SpecForge and AngelSlim write it"
EMBEDDING, Q_PROJ, K_PROJ = (
    "embed_tokens.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
)

_NAMES = {
    "embedding": EMBEDDING,
    "fc.weight": "fc.weight",
    **{f"fc_norm.{i}.weight": f"fc_norm.{i}.weight" for i in range(TAPS)},
    "embedding_norm.weight": "midlayer.input_layernorm.weight",
    "hidden_norm.weight": "midlayer.hidden_norm.weight",
    "q.weight": Q_PROJ,
    "k.weight": K_PROJ,
    "v.weight": "midlayer.self_attn.v_proj.weight",
    "o.weight": "midlayer.self_attn.o_proj.weight",
    "mlp_norm.weight": "midlayer.post_attention_layernorm.weight",
    "gate.weight": "midlayer.mlp.gate_proj.weight",
    "up.weight": "midlayer.mlp.up_proj.weight",
    "down.weight": "midlayer.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def read_eagle3_config(path: Path, target: DecoderConfig, given: Eagle3Overrides | None = None) -> Eagle3Config:
    """Read the geometry of the head in the checkpoint folder `path`; check it against `target` and all tensor headers.

    Overrides `given` by the recipe win. Without any `rope_theta` the base is 10000: EAGLE and AngelSlim trained with
    10000 whatever their config.json says, SpecForge with the base in its config.json. Raises `CheckpointError`.
    """
    return _examine(path, target, given or Eagle3Overrides()).config


def load_eagle3(
    path: Path, target_config: DecoderConfig, dtype: WeightType = "float32", given: Eagle3Overrides | None = None
) -> Eagle3Head:
    """Load the head with all weights in `dtype`, on the CPU, frozen and in eval mode.

    Projections are transposed to `[in, out]`; `embedding` is None where the target's embedding serves. Raises
    `CheckpointError` naming the file, the key, the expectation and the finding.
    """
    head = _examine(path, target_config, given or Eagle3Overrides())
    values: dict[str, Tensor] = fill(head.tensors, head.wanted, dtype)
    head.module.load_state_dict(values | {"target_ids": head.target_ids}, assign=True)
    return head.module.requires_grad_(False).eval()


def defer_eagle3(
    path: Path, target_config: DecoderConfig, dtype: WeightType = "float32", given: Eagle3Overrides | None = None
) -> Eagle3Head:
    """Return the head of `load_eagle3` without values, for graphs that read them as they are written.

    Raises `CheckpointError` as `load_eagle3`, but for values that are not finite: reading them does.
    """
    head = _examine(path, target_config, given or Eagle3Overrides())
    defer(head.module, head.tensors, head.wanted, dtype)
    head.module.target_ids = head.target_ids
    return head.module.eval()


class _Head(NamedTuple):
    """A checkpoint that passed all checks and whose weights are still to be read; `module` has no weights yet."""

    config: Eagle3Config
    module: Eagle3Head
    tensors: TensorSource
    wanted: dict[str, Slot]
    target_ids: Tensor


def _examine(path: Path, target: DecoderConfig, given: Eagle3Overrides) -> _Head:
    check_folder(path)
    file = path / "config.json"
    raw = read_json(file)
    stored = Weights(path, pickled=True)
    tensors = as_described(stored, raw, file)
    speculators = is_speculators(raw)
    if given.aux_layers is not None:
        taps = Taps(given.aux_layers, "aux_layers of the recipe")
    elif speculators:
        taps = read_speculators_taps(file, raw, target.num_layers)
    else:
        taps = read_taps(file, raw, target.num_layers)
    if speculators:
        raw = flattened(file, raw)
    config = _read_config(file, raw, tensors, target, given, taps)
    with torch.device("meta"):
        module = Eagle3Head(config)
    wanted = slots(module, _NAMES.__getitem__)
    optional, kind = map_slots(config.draft_vocab_size, config.vocab_size), KIND
    if speculators:
        wanted = {speculators_name(name): slot for name, slot in wanted.items()}
        optional |= tensors_of_training(config.draft_vocab_size, config.target_hidden_size)
        kind = OF_SPECULATORS
    check_tensors(tensors, stored.source, file, kind, wanted, optional)
    target_ids = read_target_ids(tensors, stored.source, config.draft_vocab_size, config.vocab_size)
    return _Head(config, module, tensors, wanted, target_ids)


def _read_config(
    file: Path,
    raw: dict[str, Any],
    tensors: TensorSource,
    target: DecoderConfig,
    given: Eagle3Overrides,
    taps: Taps,
) -> Eagle3Config:
    refuse_unsupported(raw, file)
    get = Reader(raw, file)
    if raw.get("norm_before_residual"):
        raise CheckpointError(f"{file}: norm_before_residual is on; such heads cannot be compiled")
    if get.integer("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{file}: num_hidden_layers is {raw['num_hidden_layers']}; an EAGLE3 head has 1")
    hidden = get.integer("hidden_size")
    own_embedding = EMBEDDING in tensors.found
    _check_target(file, raw, get, hidden, own_embedding, target)
    vocab = get.integer("vocab_size")
    draft_vocab = get.integer("draft_vocab_size", vocab)
    if draft_vocab > vocab:
        raise CheckpointError(f"{file}: draft_vocab_size {draft_vocab} is greater than vocab_size {vocab}")
    heads, kv_heads, head_dim = _heads(file, raw, get, hidden, tensors)
    theta, scaling = read_rope(raw, file, get, None)
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=get.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        draft_vocab_size=draft_vocab,
        vocab_size=vocab,
        rms_norm_eps=get.rms_norm_eps(),
        rope_theta=theta if given.rope_theta is None else given.rope_theta,
        rope_scaling=scaling,
        own_embedding=own_embedding,
        fc_norm=get.boolean("fc_norm", any(name.startswith("fc_norm.") for name in tensors.found)),
        norm_output=get.boolean("norm_output", False) if given.norm_output is None else given.norm_output,
        taps=taps,
    )


def _check_target(
    file: Path, raw: dict[str, Any], get: Reader, hidden: int, own_embedding: bool, target: DecoderConfig
) -> None:
    """Raise `CheckpointError` unless the head was made for a target of this width and vocabulary."""
    key = "target_hidden_size" if raw.get("target_hidden_size") is not None else "hidden_size"
    if get.integer(key) != target.hidden_size:
        absent = "" if key == "target_hidden_size" else ", which stands for the absent target_hidden_size,"
        raise CheckpointError(
            f"{file}: {key}{absent} is {raw[key]}, but the target's hidden_size is {target.hidden_size}; "
            "give a head that was trained for this target"
        )
    if get.integer("vocab_size") != target.vocab_size:
        raise CheckpointError(
            f"{file}: vocab_size is {raw['vocab_size']}, but the target's is {target.vocab_size}; "
            "give a head that was trained for this target"
        )
    if not own_embedding and hidden != target.hidden_size:
        raise CheckpointError(
            f"{file.parent}: tensor {EMBEDDING!r} is missing, and the target's embedding is {target.hidden_size} wide, "
            f"not {hidden} (hidden_size of {file.name}), so it cannot stand in; give a checkpoint that holds one"
        )


def _heads(file: Path, raw: dict[str, Any], get: Reader, hidden: int, tensors: TensorSource) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head_dim): the counts from config.json, head_dim from the tensors' shapes."""
    heads = get.integer("num_attention_heads")
    kv_heads = get.integer("num_key_value_heads", heads)
    named = get.integer("head_dim") if raw.get("head_dim") is not None else None
    if heads % kv_heads:
        raise CheckpointError(
            f"{file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    rows = _rows(tensors, Q_PROJ)
    if rows is None:  # `check_tensors` reports the missing tensor later
        return heads, kv_heads, named or hidden // heads
    head_dim, rest = divmod(rows, heads)
    if rest or head_dim % 2 or not head_dim:
        raise CheckpointError(
            f"{tensors.found[Q_PROJ].file}: tensor {Q_PROJ!r} has {rows} rows, expected an even number for each of the "
            f"{heads} heads (num_attention_heads) of {file}"
        )
    if named not in (None, head_dim):
        raise CheckpointError(
            f"{file}: head_dim is {named}, but tensor {Q_PROJ!r} has {rows} rows, which is {head_dim} for each of "
            f"{heads} heads; correct head_dim or num_attention_heads"
        )
    keys = _rows(tensors, K_PROJ)
    if keys not in (None, kv_heads * head_dim):
        raise CheckpointError(
            f"{file}: num_key_value_heads is {kv_heads}, but tensor {K_PROJ!r} has {keys} rows, expected "
            f"{kv_heads * head_dim} with heads of {head_dim}; correct num_key_value_heads or num_attention_heads"
        )
    return heads, kv_heads, head_dim


def _rows(tensors: TensorSource, name: str) -> int | None:
    """Return the number of rows of a matrix of the checkpoint; None where there is no such matrix."""
    found = tensors.found.get(name)
    return found.shape[0] if found is not None and len(found.shape) == 2 else None
