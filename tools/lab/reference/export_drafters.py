"""Write trained drafters beside the target: an EAGLE3 head in SpecForge's layout, a DSpark head in DeepSpec's, a draft
model in Hugging Face's.

Projections of heads have few bits unless told otherwise (`compressed.py`). The weights under one folder stay below
SIZE_LIMIT together, which is checked before a training begins.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.compiler.block_checkpoint import stored_block_name
from outrider.compiler.block_layouts import DEEPSPEC_CLASS
from outrider.compiler.eagle3_checkpoint import EMBEDDING, K_PROJ, Q_PROJ
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import Confidence
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.quantization import SETTINGS
from outrider.compiler.open_head import D2T, T2D
from outrider.compiler.slots import slots
from outrider.plans.errors import CheckpointError
from outrider.tools.lab.reference.acceptance import NEW_TOKENS, Acceptance
from outrider.tools.lab.reference.compressed import FLOAT, USUAL, compress, stored_size
from outrider.tools.lab.reference.export import write_decoder, write_json

WEIGHTS = "model.safetensors"
SIZE_LIMIT = 28_200_000
_HEAD_NAMES = {
    "embedding": EMBEDDING,
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
}
"""Where a head's parameters are stored under other names than their own."""


def check_size(model: nn.Module, folder: Path, bits: int = FLOAT) -> None:
    """Print what `model`, its projections with `bits` bits, and all weights beside it take.

    Raises `CheckpointError` where that is above SIZE_LIMIT.
    """
    size = sum(stored_size(name, tuple(reversed(p.shape)), bits) for name, p in model.named_parameters())
    if isinstance(model, Eagle3Head):
        size += 8 * model.config.draft_vocab_size + model.config.vocab_size
    beside = [f for f in folder.parent.glob("*/*.safetensors") if f.parent != folder]
    total = size + sum(f.stat().st_size for f in beside)
    print(f"{folder.name}: {size / 1e6:.2f} MB of weights, {total / 1e6:.2f} MB with those beside it", flush=True)
    if total > SIZE_LIMIT:
        names = ", ".join(sorted(f.parent.name for f in beside)) or "nothing"
        raise CheckpointError(
            f"{folder} would take {size / 1e6:.2f} MB, {total / 1e6:.2f} MB with {names} beside it; all reference "
            f"weights together may take {SIZE_LIMIT / 1e6:.1f} MB: choose a smaller geometry or another --out"
        )


def write_eagle3(head: Eagle3Head, max_positions: int, folder: Path, bits: int = USUAL) -> None:
    """`config.json` and the weights as SpecForge writes them: bf16, and projections as integers of `bits` bits."""
    c = head.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        tensor = parameter.T if parameter.ndim == 2 and name != "embedding" else parameter
        tensors[_HEAD_NAMES.get(name, name)] = tensor.detach().cpu().contiguous()
    ids = head.target_ids.cpu()
    if c.draft_vocab_size < c.vocab_size:
        tensors[D2T] = ids - torch.arange(c.draft_vocab_size)
        tensors[T2D] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "hidden_size": c.hidden_size,
        "target_hidden_size": c.target_hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "fc_norm": c.fc_norm,
        # Absent where it is off: some versions of SpecForge read false as no norm before lm_head.
        **({"norm_output": True} if c.norm_output else {}),
        # Layers whose outgoing streams count: one lower than those whose incoming ones do. The first is 1.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in c.aux_layers]},
        "dtype": "bfloat16",
    }
    _write_head(tensors, config, folder, bits)


def write_block(head: BlockHead, target: DecoderConfig, folder: Path, bits: int = USUAL) -> None:
    """`config.json` and the weights as DeepSpec writes them, without its copies of the target's weights: bf16, and
    projections as integers of `bits` bits."""
    c = head.config
    folder.mkdir(parents=True, exist_ok=True)
    parameters = dict(head.named_parameters())
    tensors = {
        name: (parameters[slot.parameter].T if slot.transposed else parameters[slot.parameter])
        .detach()
        .cpu()
        .contiguous()
        for name, slot in slots(head, stored_block_name).items()
    }
    config: dict[str, object] = {
        "architectures": [DEEPSPEC_CLASS],
        "model_type": "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": target.max_positions,
        "attention_bias": c.attention_bias,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * c.num_layers,
        "block_size": c.block_size,
        "num_target_layers": target.num_layers,
        # Layers whose outgoing streams count: one lower than those whose incoming ones do.
        "target_layer_ids": [layer - 1 for layer in c.aux_layers],
        "mask_token_id": c.mask_token_id,
        "markov_rank": c.markov_rank,
        "markov_head_type": None if c.markov is None else c.markov.kind,
        "enable_confidence_head": c.confidence is not Confidence.NONE,
        "confidence_head_with_markov": c.confidence is Confidence.HIDDEN_AND_MARKOV,
        "dtype": "bfloat16",
    }
    _write_head(tensors, config, folder, bits)


def _write_head(tensors: dict[str, Tensor], config: dict[str, object], folder: Path, bits: int) -> None:
    made = compress(tensors, bits)
    stored = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in made.tensors.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / "config.json", config | ({SETTINGS[0]: made.settings} if made.packed else {}))


def write_model(model: Decoder, folder: Path) -> None:
    """A decoder; its tokenizer is the target's, which a recipe has once."""
    write_decoder(model, folder)


def write_card(
    folder: Path, title: str, about: str, report: dict[str, str], acceptance: Acceptance, more: str = ""
) -> None:
    """`README.md`: what it is, how it was trained, its acceptance by depth, and `more`."""
    depths = len(acceptance.greedy)
    chain = min(4, depths)
    rows = "\n".join(f"| {key} | {value} |" for key, value in report.items())
    tables = "\n\n".join(filter(None, (acceptance.table(), more)))
    text = f"""# {title}

{about}

| | |
|---|---|
{rows}
| weights | {(folder / WEIGHTS).stat().st_size / 1e6:.2f} MB |
| tokens per verify, greedy chain of {chain} | {acceptance.tokens_per_verify(chain):.2f} |

Of the chains whose drafted tokens were the target's so far, the share whose next one is; on the target's own
continuations ({NEW_TOKENS} tokens each) of the completions in `../held_out.jsonl.gz`, depths 1 to {depths}:

{tables}

- **Data**: the training files of `../corpus.txt.gz` with the tasks made from them, and text that the target wrote from
  openings cut from those, at temperatures 0, 0.7 and 1. No held-out file was among them.
- **Licence**: the weights, Apache-2.0 as this repository; the training text is under the PSF License Agreement.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
