"""The tensors of a checkpoint folder as they are stored: safetensors, in one file or several, or a pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.compiler.models.config_reader import read_json
from outrider.compiler.quantization.form import WeightSource
from outrider.compiler.tensor_source import Stored
from outrider.plans.errors import CheckpointError

SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
# Rotary frequencies that old versions of transformers saved; the compiler recomputes them from config.json.
HARMLESS = "rotary_emb.inv_freq"

_SPELLING = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def check_folder(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder that holds config.json and *.safetensors")


class Weights:
    """The `TensorSource` of a checkpoint folder. `source` is the file that lists the tensors."""

    def __init__(self, path: Path, pickled: bool = False) -> None:
        """Read the headers. `pickled` allows `pytorch_model.bin` where there is no safetensors file."""
        listed = _listed(path)
        self.source = path / INDEX if listed is not None else _single(path, pickled)
        self.found = _inventory(self.source, listed)

    def read(self, name: str) -> Tensor:
        """Read one tensor as it is stored, into its own memory: the file may change while the process runs."""
        return self.read_part(name, None)

    def read_part(self, name: str, place: int | None) -> Tensor:
        """Read `tensor[place]` of one tensor as `read` does; with None, all of it."""
        expected = self.found[name]
        with _opened(expected.file) as tensors:
            if _header(expected.file, tensors, name) != expected:
                raise CheckpointError(f"{expected.file}: tensor {name!r} changed while it was read; start again")
            found: Tensor
            if isinstance(tensors, dict):
                found = tensors[name] if place is None else tensors[name][place]
            elif place is None:
                found = tensors.get_tensor(name)
            else:
                found = tensors.get_slice(name)[place]
            return found.clone()

    def quantized(self, name: str) -> WeightSource | None:
        """Return None: no tensor is stored as integers and scales in one; `PackedTensors` puts such parts together."""
        return None


def _inventory(source: Path, listed: dict[str, Path] | None) -> dict[str, Stored]:
    """Read all tensors' headers by name, without the harmless tensors."""
    found: dict[str, Stored] = {}
    for file in [source] if listed is None else sorted(set(listed.values())):
        with _opened(file) as tensors:
            for name in list(tensors.keys()):
                if listed is not None and listed.get(name) != file:
                    raise CheckpointError(
                        f"{file}: holds tensor {name!r}, which {source} does not place there; "
                        "the files belong to different checkpoints: download them again"
                    )
                found[name] = _header(file, tensors, name)
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
    for name, shard in weight_map.items():  # an index of unknown origin must not reach outside its folder
        if not isinstance(shard, str) or set(shard) & set("/\\\0") or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: the file of tensor {name!r} must be the name of a .safetensors file in the same folder, "
                f"found {shard!r}"
            )
    listed = {name: path / shard for name, shard in weight_map.items()}
    if single.exists() and single not in listed.values():
        raise CheckpointError(
            f"{path} holds both {SINGLE} and {INDEX}, which does not list it; remove the one that is out of date"
        )
    return listed


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
        raise CheckpointError(f"{path} holds {file.name} but no {SINGLE}; give the path of the GGUF file itself")
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; download the weights of the checkpoint")


_File = Any
"""An open file of weights: tensors by name, of a pickle, or safetensors' handle."""


def _header(file: Path, opened: _File, name: str) -> Stored:
    if isinstance(opened, dict):
        tensor = opened[name]
        kind = _SPELLING.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        return Stored(file, tuple(tensor.shape), kind)
    stored = opened.get_slice(name)
    return Stored(file, tuple(stored.get_shape()), stored.get_dtype())


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Read a `pytorch_model.bin`; `weights_only` loads its tensors and refuses everything else that a pickle can do."""
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
        plain = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
        if not isinstance(name, str) or not plain:
            raise CheckpointError(f"{file}: {name!r} must be a plain tensor, found a {type(value).__name__}")
    return content


@contextmanager
def _opened(file: Path) -> Iterator[_File]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, though {file.parent / INDEX} lists it; download it again")
    if file.name == PICKLED:
        yield _unpickled(file)
        return
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({error}); download it again") from None
