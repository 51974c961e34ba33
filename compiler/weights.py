"""The tensors of a checkpoint folder, read strictly: every tensor is expected, found, and of the right shape and type.

All headers are read and checked before any weight, so that a bad checkpoint fails at once. Weights are then
copied one by one into their final type and layout: peak memory is the model and one tensor of the file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from compiler.models.config import WeightType, read_json
from compiler.models.quantization import refuse_quantized_tensors
from plans.errors import CheckpointError

SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
# Rotary frequencies that old versions of transformers saved; the compiler recomputes them from config.json.
HARMLESS = "rotary_emb.inv_freq"
FLOATS = ("F64", "F32", "F16", "BF16")
"""The types in which weights may be stored, in safetensors' spelling."""

_TORCH: dict[WeightType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_SPELLING = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def check_folder(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a folder."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder that holds config.json and *.safetensors")


@dataclass(frozen=True)
class Slot:
    """The parameter that a tensor of the checkpoint fills; `shape` and `dtypes` are as the checkpoint may store it."""

    parameter: str
    shape: tuple[int, ...]
    transposed: bool = False
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class Stored:
    """A tensor's entry in the header of `file`; `dtype` is in safetensors' spelling."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def slots(module: nn.Module, stored_name: Callable[[str], str]) -> dict[str, Slot]:
    """Return every parameter's slot by its name in the checkpoint, which stores projections transposed."""
    wanted = {}
    for parameter, tensor in module.named_parameters():
        transposed = tensor.ndim == 2 and parameter != "embedding"
        shape = tuple(tensor.T.shape) if transposed else tuple(tensor.shape)
        wanted[stored_name(parameter)] = Slot(parameter, shape, transposed)
    return wanted


class Weights:
    """The tensors of a checkpoint folder: all headers at once (`found`), values on request."""

    def __init__(self, path: Path, pickled: bool = False) -> None:
        """Read the headers. `pickled` allows `pytorch_model.bin` where there is no safetensors file."""
        self.path = path
        listed = _listed(path)
        self.source = path / INDEX if listed is not None else _single(path, pickled)
        self.found = _inventory(self.source, listed)

    def check(
        self,
        kind: str,
        wanted: Mapping[str, Slot],
        optional: Mapping[str, Slot] | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the checkpoint has all `wanted` tensors, and no others but `optional` ones.

        Shapes and types must be the slots'. `kind` names the model that the tensors make; `hints` say, by tensor name,
        what to do if only that tensor is missing.
        """
        config, found, allowed = self.path / "config.json", self.found, {**wanted, **(optional or {})}
        refuse_quantized_tensors(((name, stored.dtype) for name, stored in found.items()), self.source)
        missing = [name for name in wanted if name not in found]
        unexpected = [name for name in found if name not in allowed]
        if missing:
            instead = f"; found instead {_some(unexpected)}" if unexpected else ""
            hint = (hints or {}).get(missing[0]) if len(missing) == 1 else None
            raise CheckpointError(
                f"{self.source}: tensor {_some(missing)} is missing, expected of {kind} "
                f"with shape {list(wanted[missing[0]].shape)}{instead}; {hint or 'give a complete checkpoint'}"
            )
        if unexpected:
            raise CheckpointError(
                f"{found[unexpected[0]].file}: tensor {_some(unexpected)} is unexpected: {kind}, "
                f"as {config} describes it, has none of that name; give a checkpoint that is one"
            )
        for name, stored in found.items():
            slot = allowed[name]
            if stored.shape != slot.shape:
                raise CheckpointError(
                    f"{stored.file}: tensor {name!r} has shape {list(stored.shape)}, "
                    f"but {config} asks for {list(slot.shape)}; give files that belong together"
                )
            if stored.dtype not in slot.dtypes:
                raise CheckpointError(
                    f"{stored.file}: tensor {name!r} is stored as {stored.dtype}, expected {', '.join(slot.dtypes)}; "
                    "quantised or converted checkpoints cannot be compiled: give the original one"
                )

    def fill(self, wanted: Mapping[str, Slot], dtype: WeightType) -> dict[str, Tensor]:
        """Read the `wanted` tensors by parameter, in `dtype` and in the module's layout, each in its own memory."""
        weights: dict[str, Tensor] = {}
        for file in sorted({self.found[name].file for name in wanted}):
            with _tensors_of(file) as tensors:
                for name, slot in wanted.items():
                    if self.found[name].file == file:
                        weights[slot.parameter] = _copy(tensors.tensor(name), slot, _TORCH[dtype], file, name)
        return weights

    def read(self, name: str) -> Tensor:
        """Read one tensor as it is stored, into its own memory."""
        with _tensors_of(self.found[name].file) as tensors:
            return tensors.tensor(name).clone()


def _inventory(source: Path, listed: dict[str, Path] | None) -> dict[str, Stored]:
    """Read all tensors' headers by name, without the harmless tensors."""
    found: dict[str, Stored] = {}
    for file in [source] if listed is None else sorted(set(listed.values())):
        with _tensors_of(file) as tensors:
            for name in tensors.names():
                if listed is not None and listed.get(name) != file:
                    raise CheckpointError(
                        f"{file}: holds tensor {name!r}, which {source} does not place there; "
                        "the files belong to different checkpoints: download them again"
                    )
                found[name] = tensors.header(name)
    for name, file in (listed or {}).items():
        if name not in found:
            raise CheckpointError(
                f"{file}: tensor {name!r} is missing, though {source} places it there; download the file again"
            )
    return {name: stored for name, stored in found.items() if not name.endswith(HARMLESS)}


def _listed(path: Path) -> dict[str, Path] | None:
    """Return the file of every tensor by `model.safetensors.index.json`; None where the checkpoint is one file."""
    index, single = path / INDEX, path / SINGLE
    if not index.exists():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names, found {weight_map!r}")
    listed = {name: path / _shard_name(index, name, shard) for name, shard in weight_map.items()}
    if single.exists() and single not in listed.values():
        raise CheckpointError(
            f"{path} holds both {SINGLE} and {INDEX}, which does not list it; remove the one that is out of date"
        )
    return listed


def _shard_name(index: Path, tensor: str, shard: object) -> str:
    """Return `shard` if it is a bare file name: an index of unknown origin must not reach outside its folder."""
    plain = isinstance(shard, str) and not set(shard) & set("/\\\0") and shard.endswith(".safetensors")
    if not isinstance(shard, str) or not plain:
        raise CheckpointError(
            f"{index}: the file of tensor {tensor!r} must be the name of a .safetensors file in the same folder, "
            f"found {shard!r}"
        )
    return shard


def _single(path: Path, pickled: bool) -> Path:
    """Return the file of a checkpoint with one file of weights."""
    for name in (SINGLE, PICKLED) if pickled else (SINGLE,):
        if (path / name).exists():
            return path / name
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickled:
        beside = f" beside {others[0]}" if others else ""
        raise CheckpointError(f"{path} holds no {SINGLE}, {INDEX} or {PICKLED}{beside}; give a folder with one of them")
    if others:
        raise CheckpointError(
            f"{path} holds {others[0]} but no {SINGLE}; pickled weights are not read: "
            "save the model again with transformers' save_pretrained"
        )
    if (file := next(path.glob("*.gguf"), None)) is not None:
        raise CheckpointError(
            f"{path} holds {file.name} but no {SINGLE}; GGUF files are not supported yet: give the checkpoint that it "
            "was made from"
        )
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; download the weights of the checkpoint")


class _Tensors(Protocol):
    """An open file of weights."""

    def names(self) -> list[str]: ...

    def header(self, name: str) -> Stored: ...

    def tensor(self, name: str) -> Tensor: ...


class _Safetensors:
    def __init__(self, file: Path, handle: Any) -> None:
        self._file, self._handle = file, handle

    def names(self) -> list[str]:
        return list(self._handle.keys())

    def header(self, name: str) -> Stored:
        stored = self._handle.get_slice(name)
        return Stored(self._file, tuple(stored.get_shape()), stored.get_dtype())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor


class _Pickled:
    """A `pytorch_model.bin`; `weights_only` loads its tensors and refuses everything else that a pickle can do."""

    def __init__(self, file: Path) -> None:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:  # a damaged or hostile pickle can raise any exception
            raise CheckpointError(
                f"{file} is damaged or holds more than tensors ({type(error).__name__}), and only tensors are read "
                f"from a pickle; download it again, or save its tensors as {SINGLE}"
            ) from None
        if not isinstance(content, dict) or not content:
            raise CheckpointError(f"{file} must hold tensors by name, found a {type(content).__name__}")
        for name, value in content.items():
            if not isinstance(name, str) or not _is_plain(value):
                raise CheckpointError(f"{file}: {name!r} must be a plain tensor, found a {type(value).__name__}")
        self._file, self._content = file, content

    def names(self) -> list[str]:
        return list(self._content)

    def header(self, name: str) -> Stored:
        tensor = self._content[name]
        kind = _SPELLING.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        return Stored(self._file, tuple(tensor.shape), kind)

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._content[name]
        return tensor


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


@contextmanager
def _tensors_of(file: Path) -> Iterator[_Tensors]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, though {file.parent / INDEX} lists it; download it again")
    if file.name == PICKLED:
        yield _Pickled(file)
        return
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield _Safetensors(file, handle)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({error}); download it again") from None


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} (and {len(names) - 3} more)"


def _copy(stored: Tensor, slot: Slot, dtype: torch.dtype, file: Path, name: str) -> Tensor:
    """Copy the tensor into its own memory: `stored` may map the file, which may change while the process runs."""
    source = stored.T if slot.transposed else stored
    tensor = torch.empty(source.shape, dtype=dtype).copy_(source)
    if not torch.isfinite(tensor).all():
        cause = "the file is damaged" if not torch.isfinite(stored).all() else "choose bfloat16 or float32"
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{file}: tensor {name!r} holds values that are not finite in {kind}; {cause}")
    return tensor
