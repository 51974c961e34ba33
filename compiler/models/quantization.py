"""Refuse quantised checkpoints, whose kind config.json or the tensors show; no kind can be loaded yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plans.errors import CheckpointError

_SETTINGS = ("quantization_config", "compression_config")
_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "bitnet": "BitNet",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
    "torchao": "TorchAO",
}
_ADVICE = "give the checkpoint that it was made from, in float32, float16 or bfloat16"


def refuse_quantized_config(raw: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` naming the kind where the `config.json` at `path` describes quantised weights."""
    for key in _SETTINGS:
        settings = raw.get(key)
        if not settings:
            continue
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        kind = _NAMES.get(method, method) if isinstance(method, str) and method else "quantised"
        raise CheckpointError(
            f"{path}: this is {_article(kind)} checkpoint ({key}), which is not supported yet; {_ADVICE}"
        )


def refuse_quantized_tensors(stored: Iterable[tuple[str, str]], path: Path) -> None:
    """Raise `CheckpointError` naming the kind where tensors (name, type in safetensors' spelling) are quantised."""
    pairs = list(stored)
    last = {name.rpartition(".")[2] for name, _ in pairs}
    if "g_idx" in last:
        kind = "GPTQ"
    elif "qweight" in last:
        kind = "AWQ or GPTQ"
    elif "weight_packed" in last:
        kind = "compressed-tensors"
    elif any(".quant_state" in name or name.endswith(".absmax") for name, _ in pairs):
        kind = "bitsandbytes"
    elif any(dtype.startswith("F8_") for _, dtype in pairs):
        kind = "FP8"
    else:
        return
    raise CheckpointError(
        f"{path}: this is {_article(kind)} checkpoint by its tensors, which is not supported yet; {_ADVICE}"
    )


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'AF' else 'a'} {kind}"
