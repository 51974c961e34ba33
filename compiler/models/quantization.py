"""How `config.json` says that a checkpoint's weights are quantised: a way of packing that is read, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from outrider.compiler.models.config_reader import Keys
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
    "bitnet": "BitNet",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
    "torchao": "TorchAO",
}
"""Methods that are written otherwise in messages."""
_READ = "read are AWQ (gemm), GPTQ and compressed-tensors (pack-quantized) of 4 and 8 bits, and decoders in GGUF files"
_ADVICE = "give the checkpoint that it was made from, in float32, float16 or bfloat16"


@dataclass(frozen=True)
class WeightGroup:
    """The weights of the projections that `targets` name: by name, pattern or class. `key` is its place in the file."""

    key: str
    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    size: int | None = None
    """Inputs of a group; None where an output is one."""


@dataclass(frozen=True)
class Packing:
    """How a checkpoint packs its quantised weights. With `zeros_less_one` GPTQ stores each zero point less one.

    `declared` are settings that its tensors must not contradict, by their keys in the file: `bits`, `group_size`, and
    of GPTQ `sym`, of AWQ `zero_point`. Settings that are absent, or differ between projections, are left out.
    compressed-tensors declare `groups` instead.
    """

    method: Literal["awq", "gptq", "compressed-tensors"]
    zeros_less_one: bool = False
    declared: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[WeightGroup, ...] = ()


class _Awq(Keys):
    layout: Annotated[Literal["gemm"], BeforeValidator(lambda name: str(name).lower())] = Field(
        "gemm", validation_alias=AliasChoices("version", "checkpoint_format", "format")
    )
    bits: Literal[4] = 4
    group_size: Any = None
    zero_point: Any = None

    def packing(self, key: str) -> Packing:
        return Packing("awq", declared=_declared(self, key, "group_size", "zero_point"))


class _Gptq(Keys):
    is_marlin_format: Literal[False] = False
    layout: Literal["gptq", "gptq_v2"] = Field("gptq", validation_alias=AliasChoices("checkpoint_format", "format"))
    bits: Literal[4, 8]
    pack_dtype: Literal["int32"] = "int32"
    dynamic: Any = None
    group_size: Any = None
    sym: Any = None

    def packing(self, key: str) -> Packing:
        declared = {} if self.dynamic else _declared(self, key, "bits", "group_size", "sym")
        return Packing("gptq", zeros_less_one=self.layout == "gptq", declared=declared)


PATTERN = "re:"
"""What begins a target that is a regular expression."""
_Absent = Annotated[None, BeforeValidator(lambda value: value or None)]


class _Weights(Keys):
    type: Literal["int"] = "int"
    num_bits: Literal[4, 8]
    strategy: Literal["group", "channel"]
    symmetric: bool = True
    group_size: Any = None


class _Group(Keys):
    format: Literal["pack-quantized"] = "pack-quantized"
    targets: list[str]
    weights: _Weights
    input_activations: None = None
    output_activations: None = None

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        for pattern in (target for target in self.targets if target.startswith(PATTERN)):
            try:
                re.compile(pattern.removeprefix(PATTERN))
            except re.error as error:
                raise ValueError(f"targets has {pattern!r}, no regular expression: {error}") from None
        return self

    def named(self, key: str) -> WeightGroup:
        """Return the group, whose place in the file is `key`."""
        size = self.weights.group_size
        size = size if isinstance(size, int) and size > 0 else None
        return WeightGroup(key, tuple(self.targets), self.weights.num_bits, self.weights.symmetric, size)


class _Sparsity(Keys):
    format: Literal["dense"] = "dense"


class _CompressedTensors(Keys):
    format: Literal["pack-quantized", "mixed-precision"]
    kv_cache_scheme: _Absent = None
    transform_config: _Absent = None
    sparsity_config: _Sparsity = _Sparsity()
    config_groups: dict[str, _Group] = Field(default_factory=dict)

    def packing(self, key: str) -> Packing:
        groups = (group.named(f"{key}.config_groups.{name}") for name, group in self.config_groups.items())
        return Packing("compressed-tensors", groups=tuple(groups))


_METHODS: dict[object, type[_Awq | _Gptq | _CompressedTensors]] = {
    "awq": _Awq,
    "gptq": _Gptq,
    "compressed-tensors": _CompressedTensors,
}


def _declared(settings: Keys, key: str, *names: str) -> dict[str, Any]:
    """Return those of the settings that have a value, by their places in the file."""
    return {f"{key}.{name}": value for name in names if (value := getattr(settings, name)) is not None}


def read_packing(raw: Mapping[str, Any], path: Path) -> Packing | None:
    """Return the packing that the `config.json` at `path` describes; None for weights in floating point.

    MXFP4 of families whose experts are stacked is None too: `StackedExperts` knows it by the names of tensors.
    """
    key = next((each for each in SETTINGS if raw.get(each)), None)
    if key is None:
        return None
    if not isinstance(raw[key], dict):
        raise CheckpointError(f"{path}: {key} must be a JSON object, found {raw[key]!r:.60}")
    method = raw[key].get("quant_method")
    family = FAMILIES.get(str(raw.get("model_type")))
    if method == "mxfp4" and family is not None and family.stacked:
        return None
    kind = _NAMES.get(method, method) if isinstance(method, str) and method else "quantised"
    if method not in tuple(_METHODS):
        raise CheckpointError(
            f"{path}: this is {_article(kind)} checkpoint ({key}), which is not read; {_READ}: {_ADVICE}"
        )
    advice = f"other {kind} checkpoints are not read: {_ADVICE}"
    return _METHODS[method].read(raw[key], path, key, advice).packing(key)


def refuse_quantized_tensors(stored: Iterable[tuple[str, str]], path: Path) -> None:
    """Raise `CheckpointError` naming the kind where tensors (name, type in safetensors' spelling) are quantised.

    For checkpoints whose `config.json` does not say so.
    """
    pairs = list(stored)
    last = {name.rpartition(".")[2] for name, _ in pairs}
    packed = {"g_idx": "GPTQ", "qweight": "AWQ or GPTQ", "weight_packed": "compressed-tensors"}
    kind = next((kind for part, kind in packed.items() if part in last), None)
    why = (
        "but config.json has no quantization_config, which says how they are packed; add the one that it was made with"
    )
    if kind is None:
        why = f"which is not read; {_READ}: {_ADVICE}"
        if any(".quant_state" in name or name.endswith(".absmax") for name, _ in pairs):
            kind = "bitsandbytes"
        elif any(dtype.startswith("F8_") for _, dtype in pairs):
            kind = "FP8"
    if kind is not None:
        raise CheckpointError(f"{path}: this is {_article(kind)} checkpoint by its tensors, {why}")


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'AF' else 'a'} {kind}"
