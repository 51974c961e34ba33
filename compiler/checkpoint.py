"""Checkpoints: load the decoder strictly, and hash the files that identify it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from outrider.compiler.deferred import defer
from outrider.compiler.formats.gguf_file import is_gguf
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.families import FAMILIES
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.opening import open_checkpoint
from outrider.compiler.slots import EXPERT, Slot, check_tensors, fill, slots
from outrider.compiler.tensor_source import TensorSource
from outrider.compiler.weights import INDEX, PICKLED, check_folder
from outrider.plans.errors import CheckpointError

TIED_HEAD, GGUF = "lm_head.weight", "model.gguf"
HASHED = (
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer.model",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)


def load_decoder(
    path: Path, dtype: WeightType = "float32", rope_scaling: RopeScaling | None = None, context: int | None = None
) -> Decoder:
    """Load the checkpoint at `path` with all weights in `dtype`, on the CPU, frozen and in eval mode.

    Projections are transposed to `[in, out]`; the embedding stays `[vocab, hidden]`. `rope_scaling` replaces the
    checkpoint's own, and `context` is the longest sequence, where a scaling depends on it.
    """
    model, tensors, wanted = _examine(path, rope_scaling, context)
    model.load_state_dict(fill(tensors, wanted, dtype), assign=True)
    return model.requires_grad_(False).eval()


def defer_decoder(
    path: Path, dtype: WeightType = "float32", rope_scaling: RopeScaling | None = None, context: int | None = None
) -> Decoder:
    """Return the decoder of `load_decoder` without values, for graphs that read them as they are written, and refuse
    those that are not finite then."""
    model, tensors, wanted = _examine(path, rope_scaling, context)
    defer(model, tensors, wanted, dtype)
    return model.eval()


def _examine(
    path: Path, rope_scaling: RopeScaling | None, context: int | None
) -> tuple[Decoder, TensorSource, dict[str, Slot]]:
    """Check the checkpoint, and return its decoder without weights, its tensors, and what the decoder wants of them."""
    found = open_checkpoint(path, rope_scaling, context)
    config, tensors = found.config, found.tensors
    with torch.device("meta"):
        model = Decoder(config)
    wanted = slots(model, lambda parameter: stored_name(config.family, parameter), FAMILIES[config.family].norm_offset)
    embedding = stored_name(config.family, "embedding")
    tied = {TIED_HEAD: wanted[embedding]} if config.tie_embeddings else {}
    check_tensors(
        tensors,
        found.listing,
        found.description,
        f"a {config.family} model with {config.num_layers} layers",
        wanted,
        optional=tied,
        hints={TIED_HEAD: "if the model shares it with the embedding, set tie_word_embeddings"},
    )
    if TIED_HEAD in tied and TIED_HEAD in tensors.found:  # as some tied checkpoints repeat it
        head, table = tensors.read(TIED_HEAD), tensors.read(embedding)
        kind = torch.promote_types(head.dtype, table.dtype)
        if not torch.equal(head.to(kind), table.to(kind)):
            raise CheckpointError(
                f"{tensors.found[TIED_HEAD].file}: tensor {TIED_HEAD!r} differs from the embedding, though config.json "
                "sets tie_word_embeddings; set that to false if the head is its own"
            )
    return model, tensors, wanted


def stored_name(family: str, parameter: str) -> str:
    """Return the checkpoint's name of a parameter of `Decoder`; of a stacked one with `EXPERT`."""
    parts = parameter.split(".")
    layer = parts[1] if parts[0] == "layers" else ""
    key = ".".join(["layers", "{i}", *parts[2:]]) if layer else parameter
    return FAMILIES[family].weights[key].format(i=layer, e=EXPERT)


def checkpoint_hashes(path: Path) -> dict[str, str]:
    """Return the sha256 (hex) of every file of the checkpoint that can change a plan, by file name in sorted order.

    These files are the configuration, the weights, and the tokenizer with its chat template, as far as present; or the
    one GGUF file, under any name.
    """
    if is_gguf(path):
        return {GGUF: _sha256(path)}
    check_folder(path)
    names = {name for name in HASHED if (path / name).is_file()}
    weights = {file.name for file in path.glob("*.safetensors") if file.is_file()}
    if not weights and (path / PICKLED).is_file():
        weights = {PICKLED}
    return {name: _sha256(path / name) for name in sorted(names | weights)}


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
