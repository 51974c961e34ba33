"""Open an EAGLE3 head's checkpoint folder, as strictly as a decoder's.

The layouts of SafeAILab, SpecForge and AngelSlim have the same tensor names; they differ in the file
(`pytorch_model.bin` or safetensors) and in the parts that may be absent: the embedding, the vocabulary map, keys of
`config.json`. Geometry that the tensors show is read from their shapes. speculators' layout has other names
(`eagle3_speculators`). In all of them projections may be packed, as a decoder's may be (`formats/packed_tensors`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from outrider.compiler.eagle3_speculators import KIND as OF_SPECULATORS
from outrider.compiler.eagle3_speculators import (
    flattened,
    is_speculators,
    read_speculators_taps,
    speculators_name,
)
from outrider.compiler.eagle3_taps import read_taps
from outrider.compiler.formats.packed_tensors import unpacked
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.config_reader import (
    Epsilon,
    Heads,
    HeadSize,
    InnerWidth,
    Vocabulary,
    Width,
    read_json,
)
from outrider.compiler.models.decoder_keys import PlainKeys
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import TAPS, Eagle3Config, Eagle3Overrides, Taps
from outrider.compiler.models.quantization import read_packing
from outrider.compiler.open_head import OpenHead, optional_tensors
from outrider.compiler.tensor_source import TensorSource
from outrider.compiler.weights import Weights, check_folder
from outrider.plans.errors import CheckpointError

KIND = "an EAGLE3 head as SafeAILab, SpecForge and AngelSlim write it"
EMBEDDING, Q_PROJ, K_PROJ = (
    "embed_tokens.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
)

_NONE = Eagle3Overrides()
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


class _Keys(PlainKeys):
    hidden_size: Width
    target_hidden_size: Width | None = None
    vocab_size: Vocabulary
    draft_vocab_size: Vocabulary | None = None
    num_hidden_layers: Literal[1] = 1
    intermediate_size: InnerWidth
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: HeadSize | None = None
    rms_norm_eps: Epsilon = 1e-6
    fc_norm: bool | None = None
    norm_output: bool = False
    norm_before_residual: Literal[False] = False

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is greater than vocab_size {self.vocab_size}; correct it"
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        return self


def open_eagle3(
    path: Path, target: DecoderConfig, given: Eagle3Overrides = _NONE
) -> OpenHead[Eagle3Config, Eagle3Head]:
    """Read the geometry of the head in the checkpoint folder `path`; check it against `target` and all tensor headers.

    Overrides `given` by the recipe win. Without any `rope_theta` the base is 10000: EAGLE and AngelSlim trained with
    10000 whatever their config.json says, SpecForge with the base in its config.json. Raises `CheckpointError` naming
    the file, the key or tensor, the expectation and the finding.
    """
    check_folder(path)
    file = path / "config.json"
    raw = read_json(file)
    stored = Weights(path, pickled=True)
    tensors = unpacked(stored, read_packing(raw, file))
    speculators = is_speculators(raw)
    if given.aux_layers is not None:
        taps = Taps(given.aux_layers, "aux_layers of the recipe")
    else:
        taps = (read_speculators_taps if speculators else read_taps)(file, raw, target.num_layers)
    if speculators:
        raw = flattened(file, raw)
    config = _read_config(file, raw, tensors, target, given, taps)
    sizes = config.draft_vocab_size, config.vocab_size, config.target_hidden_size
    return OpenHead.check(
        config,
        Eagle3Head,
        tensors,
        (lambda name: speculators_name(_NAMES[name])) if speculators else _NAMES.__getitem__,
        listing=stored.source,
        description=file,
        kind=OF_SPECULATORS if speculators else KIND,
        optional=optional_tensors(*sizes, training=speculators),
    )


def _read_config(
    file: Path,
    raw: dict[str, Any],
    tensors: TensorSource,
    target: DecoderConfig,
    given: Eagle3Overrides,
    taps: Taps,
) -> Eagle3Config:
    keys = _Keys.read(raw, file)
    own_embedding = EMBEDDING in tensors.found
    _check_target(keys, own_embedding, target)
    theta, scaling = keys.rope(None)
    return Eagle3Config(
        hidden_size=keys.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=keys.intermediate_size,
        num_heads=keys.num_attention_heads,
        num_kv_heads=keys.num_key_value_heads or keys.num_attention_heads,
        head_dim=_head_dim(keys, tensors),
        draft_vocab_size=keys.draft_vocab_size or keys.vocab_size,
        vocab_size=keys.vocab_size,
        rms_norm_eps=keys.rms_norm_eps,
        rope_theta=theta if given.rope_theta is None else given.rope_theta,
        rope_scaling=scaling,
        own_embedding=own_embedding,
        fc_norm=any(name.startswith("fc_norm.") for name in tensors.found) if keys.fc_norm is None else keys.fc_norm,
        norm_output=keys.norm_output if given.norm_output is None else given.norm_output,
        taps=taps,
    )


def _check_target(keys: _Keys, own_embedding: bool, target: DecoderConfig) -> None:
    """Raise `CheckpointError` unless the head was made for a target of this width and vocabulary."""
    width, key = keys.target_hidden_size, "target_hidden_size"
    if width is None:
        width, key = keys.hidden_size, "hidden_size, which stands for the absent target_hidden_size,"
    for name, own, wanted in ((key, width, target.hidden_size), ("vocab_size", keys.vocab_size, target.vocab_size)):
        if own != wanted:
            raise keys.wrong(
                f"{name} is {own}, but the target's is {wanted}; give a head that was trained for this target"
            )
    if not own_embedding and keys.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{keys.file.parent}: tensor {EMBEDDING!r} is missing, and the target's embedding is {target.hidden_size} "
            f"wide, not {keys.hidden_size} (hidden_size of {keys.file.name}), so it cannot stand in; give a checkpoint "
            "that holds one"
        )


def _head_dim(keys: _Keys, tensors: TensorSource) -> int:
    """Return the size of a head, from the tensors' shapes."""
    heads, rows = keys.num_attention_heads, _rows(tensors, Q_PROJ)
    kv_heads = keys.num_key_value_heads or heads
    if rows is None:  # `check_tensors` reports the missing tensor later
        return keys.head_dim or keys.hidden_size // heads
    head_dim, rest = divmod(rows, heads)
    if rest or head_dim % 2 or not head_dim:
        raise CheckpointError(
            f"{tensors.found[Q_PROJ].file}: tensor {Q_PROJ!r} has {rows} rows, expected an even number for each of the "
            f"{heads} heads (num_attention_heads) of {keys.file}"
        )
    if keys.head_dim not in (None, head_dim):
        raise keys.wrong(
            f"head_dim is {keys.head_dim}, but tensor {Q_PROJ!r} has {rows} rows, which is {head_dim} for each of "
            f"{heads} heads; correct head_dim or num_attention_heads"
        )
    if (found := _rows(tensors, K_PROJ)) not in (None, kv_heads * head_dim):
        raise keys.wrong(
            f"num_key_value_heads is {kv_heads}, but tensor {K_PROJ!r} has {found} rows, expected "
            f"{kv_heads * head_dim} with heads of {head_dim}; correct num_key_value_heads or num_attention_heads"
        )
    return head_dim


def _rows(tensors: TensorSource, name: str) -> int | None:
    """Return the number of rows of a matrix of the checkpoint; None where there is no such matrix."""
    found = tensors.found.get(name)
    return found.shape[0] if found is not None and len(found.shape) == 2 else None
