"""Write the trained target as a Hugging Face checkpoint, with its model card, corpus list and held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.families import FAMILIES
from outrider.tools.lab.reference.calibration import write_calibration
from outrider.tools.lab.reference.corpus import SourceFile, write_file_list
from outrider.tools.lab.reference.data import SPECIAL_TOKENS
from outrider.tools.lab.reference.prompts import write_prompts
from outrider.tools.lab.reference.tasks import CHAT_TEMPLATE


def export_target(
    model: Decoder, tokenizer: Tokenizer, files: list[SourceFile], report: dict[str, str], out: Path
) -> None:
    """Write `out/target` (bf16) and, beside it, `corpus.txt.gz`, `held_out.jsonl.gz` and `calibration.jsonl.gz`."""
    target = out / "target"
    write_decoder(model, target)
    write_tokenizer(tokenizer, target / "tokenizer.json")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    write_json(target / "tokenizer_config.json", tokenizer_config)
    write_lists(files, out)
    (target / "README.md").write_text(_card(model, report), encoding="utf-8")


def write_decoder(model: Decoder, folder: Path) -> None:
    """The weights (bf16) and configurations of a decoder, in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    c = model.config
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": c.family,
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
        "max_position_embeddings": c.max_positions,
        "attention_bias": False,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": list(c.eos_token_ids),
        "dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": list(c.eos_token_ids)})


def write_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a byte-level BPE with each merge as one text: its tokens hold no spaces, and the file is smaller."""
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def write_lists(files: list[SourceFile], out: Path) -> None:
    """Write `corpus.txt.gz` (what was read, and its split), `held_out.jsonl.gz` and `calibration.jsonl.gz` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    write_file_list(files, out / "corpus.txt.gz")
    write_prompts([f for f in files if f.held_out], out / "held_out.jsonl.gz")
    write_calibration(files, out / "calibration.jsonl.gz")


def _tensors(model: Decoder) -> dict[str, torch.Tensor]:
    weights = FAMILIES[model.config.family].weights
    tensors = {}
    for name, parameter in model.state_dict().items():
        parts = name.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        key = name.replace(f"layers.{layer}.", "layers.{i}.", 1) if layer else name
        linear = parameter.ndim == 2 and name != "embedding"
        tensor = parameter.T if linear else parameter
        tensors[weights[key].format(i=layer)] = tensor.to("cpu", torch.bfloat16).contiguous()
    return tensors


def _card(model: Decoder, report: dict[str, str]) -> str:
    c = model.config
    size = sum(p.numel() for p in model.parameters()) / 1e6
    rows = "\n".join(f"| {key} | {value} |" for key, value in report.items())
    return f"""# The reference target

A Qwen3-architecture decoder of {size:.2f}M parameters ({c.num_layers} layers, hidden {c.hidden_size},
{c.num_heads} query and {c.num_kv_heads} key/value heads of {c.head_dim}, byte-level BPE of {c.vocab_size}), bf16.
Written by `python -m outrider.tools.lab.train_reference`.

| | |
|---|---|
{rows}

- **Data**: the Python standard library's own source; files, hashes, the interpreter's version and the split are
  in `../corpus.txt.gz`. Mixed in: outlines of modules (`[PLAN]`, one function per branch) and import retrieval, both
  made from the training files (`tools/lab/reference/tasks.py`). Windows grew from 256 to 8192 tokens; the last few per
  cent of the steps saw more than 2048, so long contexts are lightly trained.
- **Use**: a small model whose text is real, for building, testing and measuring plans. It writes plausible Python, not
  correct Python.
- **Licence**: the weights, Apache-2.0 as this repository; the training text is under the PSF License Agreement, and so
  are the excerpts in `../held_out.jsonl.gz` and `../calibration.jsonl.gz`.
"""


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
