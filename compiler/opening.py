"""Open a checkpoint of any format: a folder of floats, a folder of packed projections, or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.compiler.formats.gguf_config import read_gguf_config
from outrider.compiler.formats.gguf_file import GgufFile, is_gguf
from outrider.compiler.formats.gguf_tensors import GgufTensors
from outrider.compiler.formats.packed_tensors import unpacked
from outrider.compiler.fused_tensors import FusedTensors, StackedExperts
from outrider.compiler.models.config import DecoderConfig, read_folder
from outrider.compiler.models.families import FAMILIES
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.tensor_source import TensorSource, TextTensors
from outrider.compiler.weights import Weights, check_folder


@dataclass(frozen=True)
class OpenCheckpoint:
    """A decoder's configuration and its tensors; `description` is the file that has the one, `listing` lists the
    others."""

    config: DecoderConfig
    tensors: TensorSource
    description: Path
    listing: Path


def open_checkpoint(path: Path, rope_scaling: RopeScaling | None = None, context: int | None = None) -> OpenCheckpoint:
    """Read the configuration and all headers of the checkpoint at `path`. `rope_scaling` replaces its own; `context` is
    the longest sequence that will be run, where a scaling depends on it."""
    if is_gguf(path):
        file = GgufFile.open(path)
        config = read_gguf_config(file, rope_scaling)
        return OpenCheckpoint(config, GgufTensors(file, config), path, path)
    check_folder(path)
    config, packing = read_folder(path, rope_scaling, context)
    stored, family = Weights(path), FAMILIES[config.family]
    tensors: TensorSource = stored
    if family.stacked and config.experts is not None:
        tensors = StackedExperts(stored, family.stacked, config.experts, config.hidden_size)
    tensors = unpacked(tensors, packing, _unbiased(config))
    if family.skipped:
        tensors = TextTensors(tensors, family.skipped)
    if family.fused:
        outputs = dict.fromkeys(("k_proj", "v_proj"), config.kv_size) | {"q_proj": config.query_size}
        outputs |= dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
        tensors = FusedTensors(tensors, family.fused, outputs)
    return OpenCheckpoint(config, tensors, path / "config.json", stored.source)


def read_config(path: Path, rope_scaling: RopeScaling | None = None, context: int | None = None) -> DecoderConfig:
    """Read the configuration of the checkpoint at `path`, as `open_checkpoint` does."""
    if is_gguf(path):
        return read_gguf_config(GgufFile.open(path), rope_scaling)
    return read_folder(path, rope_scaling, context)[0]


def stores_integers(path: Path, rope_scaling: RopeScaling | None = None) -> bool:
    """Return whether the checkpoint at `path` stores weights as integers with scales. Raises as `open_checkpoint`."""
    return any(stored.packed for stored in open_checkpoint(path, rope_scaling).tensors.found.values())


def _unbiased(config: DecoderConfig) -> frozenset[str]:
    """Return the projections that have no bias in the decoder, by the last part of their names in a checkpoint."""
    biased = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        "o_proj": config.output_bias,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias),
        "lm_head": False,
    }
    return frozenset(name for name, wanted in biased.items() if not wanted)
