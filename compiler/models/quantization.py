"""How `config.json` says that a checkpoint's weights are quantised: a way of packing that is read, or a refusal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outrider.compiler.models.families import FAMILIES
from outrider.plans.errors import CheckpointError

BITS = (4, 8)
"""Bits of the packed integers that are read."""

SETTINGS = ("quantization_config", "compression_config")
"""Keys of `config.json` that say how weights are quantised; the first that is set counts."""

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
_READ = "read are AWQ (gemm), GPTQ and compressed-tensors (pack-quantized) of 4 and 8 bits, and decoders in GGUF files"
_ADVICE = "give the checkpoint that it was made from, in float32, float16 or bfloat16"


@dataclass(frozen=True)
class Packing:
    """How a checkpoint packs its quantised weights. With `zeros_less_one` GPTQ stores each zero point less one.

    `declared` are settings that its tensors must not contradict, by their keys in the file: `bits`, `group_size`, and
    of GPTQ `sym`, of AWQ `zero_point`. Settings that are absent, or differ between projections, are left out.
    """

    method: Literal["awq", "gptq", "compressed-tensors"]
    zeros_less_one: bool = False
    declared: Mapping[str, Any] = field(default_factory=dict)


def read_packing(raw: Mapping[str, Any], path: Path) -> Packing | None:
    """Return the packing that the `config.json` at `path` describes; None for weights in floating point.

    MXFP4 of families whose experts are stacked is None too: `StackedExperts` knows it by the names of tensors.
    Raises `CheckpointError` naming the kind that is not read, or the key that says so.
    """
    key = next((each for each in SETTINGS if raw.get(each)), None)
    if key is None:
        return None
    settings = _Settings(raw[key], key, path)
    method = settings.get("quant_method")
    if method == "awq":
        return _awq(settings)
    if method == "gptq":
        return _gptq(settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    family = FAMILIES.get(str(raw.get("model_type")))
    if method == "mxfp4" and family is not None and family.stacked:
        return None
    kind = _NAMES.get(method, method) if isinstance(method, str) and method else "quantised"
    raise CheckpointError(f"{path}: this is {_article(kind)} checkpoint ({key}), which is not read; {_READ}: {_ADVICE}")


def refuse_quantized_tensors(stored: Iterable[tuple[str, str]], path: Path) -> None:
    """Raise `CheckpointError` naming the kind where tensors (name, type in safetensors' spelling) are quantised.

    For checkpoints whose `config.json` does not say so.
    """
    pairs = list(stored)
    last = {name.rpartition(".")[2] for name, _ in pairs}
    packed = True
    if "g_idx" in last:
        kind = "GPTQ"
    elif "qweight" in last:
        kind = "AWQ or GPTQ"
    elif "weight_packed" in last:
        kind = "compressed-tensors"
    elif any(".quant_state" in name or name.endswith(".absmax") for name, _ in pairs):
        kind, packed = "bitsandbytes", False
    elif any(dtype.startswith("F8_") for _, dtype in pairs):
        kind, packed = "FP8", False
    else:
        return
    if packed:
        raise CheckpointError(
            f"{path}: this is {_article(kind)} checkpoint by its tensors, but config.json has no quantization_config, "
            "which says how they are packed; add the one that it was made with"
        )
    raise CheckpointError(
        f"{path}: this is {_article(kind)} checkpoint by its tensors, which is not read; {_READ}: {_ADVICE}"
    )


class _Settings:
    """Values of the object that describes the quantisation, and errors that name file and key."""

    def __init__(self, values: Any, key: str, path: Path) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {key} must be a JSON object, found {values!r:.60}")
        self._values, self._key, self._path = values, key, path

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def given(self, *keys: str) -> dict[str, Any]:
        """Return the values of those of the keys that have one, by the keys' places in the file."""
        return {f"{self._key}.{key}": value for key in keys if (value := self.get(key)) is not None}

    def part(self, key: str) -> dict[str, _Settings]:
        """Return the objects in the object under `key`, by name."""
        values = self.get(key, {})
        inner = values if isinstance(values, dict) else {}
        return {name: _Settings(value, f"{self._key}.{key}.{name}", self._path) for name, value in inner.items()}

    def need(self, key: str, value: Any, allowed: tuple[Any, ...], kind: str) -> None:
        """Raise `CheckpointError` unless `value`, which `key` gives, is one of those `allowed`."""
        if value in allowed:
            return
        choice = " or ".join("absent" if each is None else f"{each}" for each in allowed)
        raise CheckpointError(
            f"{self._path}: {self._key}.{key} is {value!r:.60}, and of {kind} checkpoints only those are read where it "
            f"is {choice}; {_ADVICE}"
        )


def _awq(settings: _Settings) -> Packing:
    key = next((each for each in ("version", "checkpoint_format", "format") if settings.get(each)), "version")
    layout = settings.get(key, "gemm")
    settings.need(key, layout.lower() if isinstance(layout, str) else layout, ("gemm",), "AWQ")
    settings.need("bits", settings.get("bits", 4), (4,), "AWQ")
    return Packing("awq", declared=settings.given("group_size", "zero_point"))


def _gptq(settings: _Settings) -> Packing:
    if settings.get("is_marlin_format"):
        settings.need("is_marlin_format", True, (False,), "GPTQ")
    key = "checkpoint_format" if settings.get("checkpoint_format") else "format"
    layout = settings.get(key, "gptq")
    settings.need(key, layout, ("gptq", "gptq_v2"), "GPTQ")
    settings.need("bits", settings.get("bits"), BITS, "GPTQ")
    settings.need("pack_dtype", settings.get("pack_dtype", "int32"), ("int32",), "GPTQ")
    differing = bool(settings.get("dynamic"))
    declared = {} if differing else settings.given("bits", "group_size", "sym")
    return Packing("gptq", zeros_less_one=layout == "gptq", declared=declared)


def _compressed_tensors(settings: _Settings) -> Packing:
    kind, layout = "compressed-tensors", "pack-quantized"
    settings.need("format", settings.get("format"), (layout, "mixed-precision"), kind)
    for key in ("kv_cache_scheme", "transform_config"):
        settings.need(key, settings.get(key) or None, (None,), kind)
    sparsity = settings.get("sparsity_config", {})
    settings.need(
        "sparsity_config", sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity, ("dense",), kind
    )
    for group in settings.part("config_groups").values():
        group.need("format", group.get("format", layout), (layout,), kind)
        for key in ("input_activations", "output_activations"):
            group.need(key, group.get(key), (None,), kind)
        values = group.get("weights")
        weights = _Settings(values if values is not None else {}, f"{group._key}.weights", group._path)
        weights.need("type", weights.get("type", "int"), ("int",), kind)
        weights.need("num_bits", weights.get("num_bits"), BITS, kind)
        weights.need("strategy", weights.get("strategy"), ("group", "channel"), kind)
    return Packing("compressed-tensors")


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'AF' else 'a'} {kind}"
