"""Open a block drafter's checkpoint folder, as strictly as a decoder's.

The layouts of z-lab, JetSpec, DeepSpec and speculators have the same tensor names. They differ in config.json
(`block_layouts`) and in the tensors that are there: z-lab and JetSpec leave the embedding and the output weights to
the target; DeepSpec stores copies of both, frozen in training, so that both may be absent and the target's serve;
speculators stores output weights of the draft vocabulary, the map of that vocabulary, and mostly the embedding.
In all of them projections may be packed, as a decoder's may be (`formats/packed_tensors`).
"""

from __future__ import annotations

from pathlib import Path

from outrider.compiler.block_layouts import Layout, layout_of, read_layout
from outrider.compiler.checkpoint import stored_name
from outrider.compiler.formats.packed_tensors import unpacked
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.config_reader import read_json
from outrider.compiler.models.quantization import read_packing
from outrider.compiler.open_head import HeadFiles, OpenHead, optional_tensors
from outrider.compiler.weights import Weights, check_folder

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_MODULES = {
    "fc": "fc",
    "markov.gate": "markov_head.gate_proj",
    "markov.joint": "markov_head.joint_proj",
    "confidence_head": "confidence_head.proj",
}
_NAMES = {
    "context_norm.weight": "hidden_norm.weight",
    "markov.embedding": "markov_head.markov_w1.weight",
    "markov.output.weight": "markov_head.markov_w2.weight",
    **{f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in _MODULES.items() for kind in ("weight", "bias")},
}


def open_block(path: Path, target: DecoderConfig) -> OpenHead[BlockConfig, BlockHead]:
    """Read the geometry of the head in the folder `path`; check it against `target` and all tensor headers."""
    check_folder(path)
    file = path / "config.json"
    raw = read_json(file)
    layout = layout_of(file, raw)
    stored = Weights(path)
    tensors = unpacked(stored, read_packing(raw, file))
    of_target = {Layout.ZLAB: (), Layout.DEEPSPEC: (EMBEDDING, LM_HEAD), Layout.SPECULATORS: (EMBEDDING,)}[layout]
    own_embedding = any(name in tensors.found for name in of_target)
    config = read_layout(file, raw, layout, target, own_embedding)
    sizes = config.draft_vocab_size, config.vocab_size, config.target_hidden_size
    optional = optional_tensors(*sizes, training=True) if layout is Layout.SPECULATORS else {}
    files = HeadFiles(tensors, stored.source, file, layout.value, optional)
    return OpenHead.check(config, BlockHead, files, stored_block_name)


def stored_block_name(parameter: str) -> str:
    """Return the name of a `BlockHead`'s parameter in a checkpoint."""
    return _NAMES.get(parameter) or stored_name("qwen3", parameter).removeprefix("model.")
