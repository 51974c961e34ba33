"""Open an EAGLE3 head's checkpoint folder, as strictly as a decoder's.

The layouts of SafeAILab, SpecForge and AngelSlim have the same tensor names; they differ in the file
(`pytorch_model.bin` or safetensors) and in the parts that may be absent: the embedding, the vocabulary map, keys of
`config.json`. Geometry that the tensors show is read from their shapes. speculators' layout is the same head under
other names, described by two nested objects, and read strictly (`known_keys`): its keys are those of speculators'
`Eagle3SpeculatorConfig` and of a Llama layer. In all layouts projections may be packed (`formats/packed_tensors`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from outrider.compiler.eagle3_taps import default_taps, name_taps, read_taps
from outrider.compiler.formats.packed_tensors import unpacked
from outrider.compiler.known_keys import DECODER, GEOMETRY, HARMLESS, TYPE, WINDOW, SpeculatorsKeys, StrictKeys
from outrider.compiler.models import config_reader as reader
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder_keys import PlainKeys
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import TAPS, Eagle3Config, Eagle3Overrides, Taps
from outrider.compiler.models.quantization import SETTINGS, read_packing
from outrider.compiler.open_head import HeadFiles, OpenHead, optional_tensors
from outrider.compiler.tensor_source import TensorSource
from outrider.compiler.weights import Weights, check_folder
from outrider.plans.errors import CheckpointError

KIND = "an EAGLE3 head as SafeAILab, SpecForge and AngelSlim write it"
OF_SPECULATORS = "an EAGLE3 head as speculators writes it"
EMBEDDING = "embed_tokens.weight"
Q_PROJ, K_PROJ = "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight"
_OUTER = {"draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "norm_before_residual"}

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
    hidden_size: reader.Width
    target_hidden_size: reader.Width | None = None
    vocab_size: reader.Vocabulary
    draft_vocab_size: reader.Vocabulary | None = None
    num_hidden_layers: Literal[1] = 1
    intermediate_size: reader.InnerWidth
    num_attention_heads: reader.Heads
    num_key_value_heads: reader.Heads | None = None
    head_dim: reader.HeadSize | None = None
    rms_norm_eps: reader.Epsilon = 1e-6
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


class _SpeculatorsLayer(StrictKeys):
    ignored = (GEOMETRY | HARMLESS | WINDOW) - {"model_type", "attention_bias"}

    model_type: Literal["llama"]
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    quantization_config: Any = None
    compression_config: Any = None

    @model_validator(mode="after")
    def _check_floats(self) -> Self:
        """The verifier's own configuration may have been copied here."""
        key = next((key for key in SETTINGS if getattr(self, key)), None)
        if key is not None:
            raise ValueError(
                f"{key} describes quantised weights, and those of a head are described beside {DECODER}; move it "
                "there, or remove it where the head's weights are floats"
            )
        return self


class _SpeculatorsHead(SpeculatorsKeys):
    speculators_model_type: Literal["eagle3"]
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: Literal[False] = False
    # Read with the layer's keys, as of other projects.
    draft_vocab_size: Any = None
    target_hidden_size: Any = None
    fc_norm: Any = None
    norm_output: Any = None
    norm_before_residual: Any = None

    def taps(self, layers: int) -> Taps:
        """Return the taps named for a target of `layers` layers, or default.

        speculators always names the layer that a stream enters, under a key whose first id decides in other layouts.
        """
        if self.eagle_aux_hidden_state_layer_ids is None:
            return default_taps(layers)
        key, why = "eagle_aux_hidden_state_layer_ids", "indices of hidden_states, as speculators writes them"
        ids = self.eagle_aux_hidden_state_layer_ids
        return name_taps(self.file, key, ids, range(layers), why, left=False, count=TAPS)

    def flattened(self) -> dict[str, Any]:
        """Return the values of a config.json that other projects would write for this head."""
        layer, outer = self.transformer_layer_config, self.model_dump(include=_OUTER, exclude_none=True)
        _SpeculatorsLayer.read(layer, self.file, DECODER, "EAGLE3 heads that differ in it cannot be compiled")
        return layer | outer


def open_eagle3(
    path: Path, target: DecoderConfig, given: Eagle3Overrides = _NONE
) -> OpenHead[Eagle3Config, Eagle3Head]:
    """Read the geometry of the head in the checkpoint folder `path`; check it against `target` and all tensor headers.

    Overrides `given` by the recipe win. Without any `rope_theta` the base is 10000: EAGLE and AngelSlim trained with
    10000, independent of their config.json, SpecForge with the base in its config.json.
    """
    check_folder(path)
    file = path / "config.json"
    raw = reader.read_json(file)
    stored = Weights(path, pickled=True)
    tensors = unpacked(stored, read_packing(raw, file))
    speculators = _SpeculatorsHead.read(raw, file) if raw.get(TYPE) is not None else None
    if given.aux_layers is not None:
        taps = Taps(given.aux_layers, "aux_layers of the recipe")
    else:
        taps = speculators.taps(target.num_layers) if speculators else read_taps(file, raw, target.num_layers)
    if speculators:
        raw = speculators.flattened()
    config = _read_config(file, raw, tensors, target, given, taps)
    sizes = config.draft_vocab_size, config.vocab_size, config.target_hidden_size
    optional = optional_tensors(*sizes, training=speculators is not None)
    files = HeadFiles(tensors, stored.source, file, OF_SPECULATORS if speculators else KIND, optional)
    nested = (lambda name: _NAMES[name].replace("midlayer.", "layers.0.")) if speculators else _NAMES.__getitem__
    return OpenHead.check(config, Eagle3Head, files, nested)


def _read_config(
    file: Path, raw: dict[str, Any], tensors: TensorSource, target: DecoderConfig, given: Eagle3Overrides, taps: Taps
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
            f"wide, not {keys.hidden_size} (hidden_size); give a checkpoint that holds one"
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
    found = tensors.found.get(name)
    return found.shape[0] if found is not None and len(found.shape) == 2 else None
