"""A Hugging Face checkpoint folder into a `Decoder`, strictly: every tensor expected, found, and of the right shape.

All headers are read and checked before any weight is, so a bad checkpoint fails at once. Weights are then
copied one by one into their final type and layout: the peak is the model and one tensor of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compiler.models.config import DecoderConfig, WeightType, read_config
from compiler.models.decoder import Decoder
from compiler.models.families import FAMILIES
from compiler.models.rope import RopeScaling
from plans.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TIED_HEAD = "lm_head.weight"
# Rotary frequencies, which old versions of transformers saved; they are recomputed from config.json.
HARMLESS = "rotary_emb.inv_freq"
HASHED = (
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

_TORCH: dict[WeightType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_READABLE = ("F64", "F32", "F16", "BF16")


def load_decoder(path: Path, dtype: WeightType = "float32", rope_scaling: RopeScaling | None = None) -> Decoder:
    """Load the checkpoint folder `path` with all weights in `dtype`, on the CPU, frozen and in eval mode.

    Projections are transposed to `[in, out]`; the embedding stays `[vocab, hidden]`. `rope_scaling` replaces the
    checkpoint's own. Raises `CheckpointError` naming the file, the tensor, what was expected and what was found.
    """
    _check_folder(path)
    config = read_config(path, rope_scaling)
    with torch.device("meta"):
        model = Decoder(config)
    wanted = _wanted(model)
    found = _inventory(path)
    _check(path, config, wanted, found)
    weights: dict[str, Tensor] = {}
    for file in sorted({stored.file for stored in found.values()}):
        with _tensors_of(file) as tensors:
            for name, slot in wanted.items():
                if found[name].file == file:
                    weights[slot.parameter] = _copy(tensors.get_tensor(name), slot, _TORCH[dtype], file, name)
    if config.tie_embeddings and TIED_HEAD in found:
        _check_tied(weights["embedding"], found[TIED_HEAD].file)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def checkpoint_hashes(path: Path) -> dict[str, str]:
    """File name to sha256 (hex) of every file of the folder that can change a plan, in sorted order.

    Those are the configuration, the weights, and the tokenizer with its chat template, as far as present. Raises
    `CheckpointError` if the folder or a file cannot be read.
    """
    _check_folder(path)
    names = {name for name in HASHED if (path / name).is_file()}
    names |= {file.name for file in path.glob("*.safetensors") if file.is_file()}
    hashes = {}
    for name in sorted(names):
        try:
            with (path / name).open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from None
    return hashes


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of the checkpoint belongs; `shape` is as the checkpoint stores it."""

    parameter: str
    shape: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True)
class _Stored:
    """What the header of `file` says of a tensor; `dtype` is in safetensors' spelling."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _wanted(model: Decoder) -> dict[str, _Slot]:
    """Name in the checkpoint to slot, for every parameter of the model."""
    names = FAMILIES[model.config.family].weights
    slots = {}
    for parameter, tensor in model.state_dict().items():
        parts = parameter.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        key = ".".join(["layers", "{i}", *parts[2:]]) if layer else parameter
        transposed = tensor.ndim == 2 and parameter != "embedding"
        shape = tuple(tensor.T.shape) if transposed else tuple(tensor.shape)
        slots[names[key].format(i=layer)] = _Slot(parameter, shape, transposed)
    return slots


def _inventory(path: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint by name, from the headers of its files; the harmless ones left out."""
    listed = _listed(path)
    found: dict[str, _Stored] = {}
    for file in sorted(set(listed.values())) if listed is not None else [path / SINGLE]:
        with _tensors_of(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                if listed is not None and listed.get(name) != file:
                    raise CheckpointError(
                        f"{file}: holds tensor {name!r}, which {path / INDEX} does not place there; "
                        "the files belong to different checkpoints: download them again"
                    )
                stored = tensors.get_slice(name)
                found[name] = _Stored(file, tuple(stored.get_shape()), stored.get_dtype())
    for name, file in (listed or {}).items():
        if name not in found:
            raise CheckpointError(
                f"{file}: tensor {name!r} is missing, though {path / INDEX} places it there; download the file again"
            )
    return {name: stored for name, stored in found.items() if not name.endswith(HARMLESS)}


def _listed(path: Path) -> dict[str, Path] | None:
    """Tensor name to file as `model.safetensors.index.json` has it; None where the checkpoint is one file."""
    index, single = path / INDEX, path / SINGLE
    if not index.exists():
        if not single.exists():
            raise CheckpointError(_no_weights(path))
        return None
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} cannot be read as JSON: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names, found {weight_map!r}")
    listed = {name: path / _shard_name(index, name, shard) for name, shard in weight_map.items()}
    if single.exists() and single not in listed.values():
        raise CheckpointError(
            f"{path} holds both {SINGLE} and {INDEX}, which does not list it; remove the one that is out of date"
        )
    return listed


def _shard_name(index: Path, tensor: str, shard: object) -> str:
    """A bare file name: an index, which may come from anywhere, must not reach outside its folder."""
    plain = isinstance(shard, str) and not set(shard) & set("/\\\0") and shard.endswith(".safetensors")
    if not isinstance(shard, str) or not plain:
        raise CheckpointError(
            f"{index}: the file of tensor {tensor!r} must be the name of a .safetensors file in the same folder, "
            f"found {shard!r}"
        )
    return shard


def _no_weights(path: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickled:
        return (
            f"{path} holds {pickled[0]} but no {SINGLE}; pickled weights are not read: "
            "save the model again with transformers' save_pretrained"
        )
    return f"{path} holds neither {SINGLE} nor {INDEX}; download the weights of the checkpoint"


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder that holds config.json and *.safetensors")


class _Header(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _Tensors(Protocol):
    """An open file of safetensors, whose own class is untyped."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Header: ...

    def get_tensor(self, name: str) -> Tensor: ...


@contextmanager
def _tensors_of(file: Path) -> Iterator[_Tensors]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, though {file.parent / INDEX} lists it; download it again")
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield cast(_Tensors, tensors)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({error}); download it again") from None


def _check(path: Path, config: DecoderConfig, wanted: dict[str, _Slot], found: dict[str, _Stored]) -> None:
    missing = [name for name in wanted if name not in found]
    allowed = dict(wanted)
    if config.tie_embeddings:
        allowed[TIED_HEAD] = next(slot for slot in wanted.values() if slot.parameter == "embedding")
    unexpected = [name for name in found if name not in allowed]
    if missing:
        where = path / (INDEX if (path / INDEX).exists() else SINGLE)
        instead = f"; found instead {_some(unexpected)}" if unexpected else ""
        hint = "; if the model shares it with the embedding, set tie_word_embeddings" if missing == [TIED_HEAD] else ""
        raise CheckpointError(
            f"{where}: tensor {_some(missing)} is missing, expected of a {config.family} model "
            f"with shape {list(wanted[missing[0]].shape)}{instead}{hint}"
        )
    if unexpected:
        raise CheckpointError(
            f"{found[unexpected[0]].file}: tensor {_some(unexpected)} is unexpected: a {config.family} model with "
            f"{config.num_layers} layers, as {path / 'config.json'} describes it, has none of that name"
        )
    for name, stored in found.items():
        shape = allowed[name].shape
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} has shape {list(stored.shape)}, "
                f"but {path / 'config.json'} asks for {list(shape)}"
            )
        if stored.dtype not in _READABLE:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} is stored as {stored.dtype}, expected {', '.join(_READABLE)}; "
                "quantised checkpoints cannot be compiled: give the original one"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} (and {len(names) - 3} more)"


def _copy(stored: Tensor, slot: _Slot, dtype: torch.dtype, file: Path, name: str) -> Tensor:
    """The tensor in its own memory: `stored` may be a map of the file, which may change under a running process."""
    source = stored.T if slot.transposed else stored
    tensor = torch.empty(source.shape, dtype=dtype).copy_(source)
    if not torch.isfinite(tensor).all():
        cause = "the file is damaged" if not torch.isfinite(stored).all() else "choose bfloat16 or float32"
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{file}: tensor {name!r} holds values that are not finite in {kind}; {cause}")
    return tensor


def _check_tied(embedding: Tensor, file: Path) -> None:
    """Some tied checkpoints repeat the embedding as the head, which is harmless while they are equal."""
    with _tensors_of(file) as tensors:
        head = tensors.get_tensor(TIED_HEAD).to(embedding.dtype)
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"{file}: tensor {TIED_HEAD!r} differs from the embedding, though config.json sets tie_word_embeddings; "
            "expected equal values or no such tensor: set tie_word_embeddings to false if the head is its own"
        )
