"""Drafters with weights: from a recipe's section to the drafter of a plan and its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from outrider.compiler.block_checkpoint import open_block
from outrider.compiler.checkpoint import checkpoint_hashes, defer_decoder
from outrider.compiler.eagle3_checkpoint import open_eagle3
from outrider.compiler.export.block_graph import block_slots
from outrider.compiler.identity import digest
from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.config import DecoderConfig, WeightType
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import BlockDraft, DecoderDraft, Eagle3Draft
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import HeadConfig
from outrider.compiler.open_head import OpenHead
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import Recipe
from outrider.compiler.recipe_drafters import (
    BlockSection,
    Device,
    Eagle3Section,
    GraphSection,
    ModelSection,
    resolve_tree,
)
from outrider.compiler.recipe_sections import WeightsSection, positions_served
from outrider.compiler.text import read_vocabulary
from outrider.plans.errors import RecipeError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import Drafter, Geometry, GraphDrafter, Taps, Tree
from outrider.plans.plan import file_sha256
from outrider.plans.tokenizer import TOKENIZER_FILE

CHAIN = 5


@dataclass(frozen=True)
class GraphSource:
    """A drafter that has an engine: its section of the recipe, the section's index, and its model's configuration; of
    a head, the checkpoint."""

    index: int
    section: GraphSection
    config: DecoderConfig | HeadConfig
    head: OpenHead[Any, Any] | None
    tree: Tree
    sink: int = 0
    window: int = 0  # last tokens whose KV the drafter's cache keeps, after the sink's; 0: all

    @property
    def drafter(self) -> GraphDrafter:
        section = self.section
        return GraphDrafter(
            kind=section.kind,
            name=section.name,
            tree=self.tree,
            least_chance=section.least_chance,
            acceptance=section.acceptance,
            taps=None if isinstance(self.config, DecoderConfig) else Taps(**self.config.taps._asdict()),
            block=block_slots(self.config, self.tree) if isinstance(self.config, BlockConfig) else None,
        )

    def geometry(self, target: Geometry) -> Geometry:
        """Geometry whose KV cache holds the context, or a window of it, and the KV that the tree's levels append."""
        c, bucket = self.config, target.view_bucket
        held = -(-(self.sink + 2 * self.window) // bucket) * bucket + bucket if self.window else target.capacity
        grown = -(-self.drafter.grown * target.branches // bucket) * bucket
        return Geometry(
            layers=c.num_layers,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            hidden_size=c.hidden_size,
            vocab_size=c.vocab_size if isinstance(c, DecoderConfig) else c.draft_vocab_size,
            context=target.context,
            view_bucket=bucket,
            capacity=held + grown,
            prefill_chunk=target.prefill_chunk,
            branches=target.branches,
            rows=target.rows,
            sink=self.sink,
            window=self.window,
            layer_windows=c.windows_within(target.context) if isinstance(c, DecoderConfig) else (),
        )


def read_sources(recipe: Recipe, target: DecoderConfig) -> list[GraphSource]:
    """Read the configurations of the recipe's drafters with weights, and check them against the target's."""
    sources = []
    for index, section in enumerate(recipe.drafters):
        if isinstance(section, HostDrafter):
            continue
        path, at = recipe.drafter_path(section), ("drafters", index)
        head: OpenHead[Any, Any] | None = None
        config: DecoderConfig | HeadConfig
        if isinstance(section, BlockSection):
            head = open_block(path, target)
            config, size = head.config, head.config.draft_vocab_size
        elif isinstance(section, Eagle3Section):
            given, most = section.aux_layers, target.num_layers - 1
            if given is not None and (len(set(given)) < len(given) or not set(given) <= set(range(most + 1))):
                clause = f"is {list(given)}; name three different layers from 0 to {most}"
                raise recipe.error((*at, "aux_layers"), clause)
            head = open_eagle3(path, target, section.overrides)
            config, size = head.config, head.config.draft_vocab_size
        else:
            config = read_config(path, section.scaling, recipe.capacity.context)
            size = config.vocab_size
            _check_model(recipe, index, section, config, target)
        tree = _tree(section, config, recipe.device)
        if isinstance(config, BlockConfig) and tree.depth >= config.drafted:
            key, most = ("gamma",) if section.tree is None else ("tree", "depth"), config.drafted
            clause = f"asks for {tree.depth + 1} tokens one after another, and a block of the head has {most}; lower it"
            raise recipe.error((*at, *key), clause)
        if tree.top_k > size:
            clause = f"is {tree.top_k}, but the drafter knows {size} tokens; lower it"
            raise recipe.error((*at, "tree", "top_k"), clause)
        if section.acceptance == "rejection" and tree.top_k != 1:
            chain = "tree: {top_k: 1, depth: 3, nodes: 5}" if isinstance(section, Eagle3Section) else "gamma: 4"
            clause = f"is rejection, which is for chains; draft one, as with {chain}, or leave acceptance coupled"
            raise recipe.error((*at, "acceptance"), clause)
        if section.acceptance == "rejection" and tree.nodes != tree.depth + 2:
            clause = f"is {tree.nodes}, but a chain of depth {tree.depth} has {tree.depth + 2}; set it to that"
            raise recipe.error((*at, "tree", "nodes"), clause)
        keeps = recipe.partial_kv.drafters_keep(recipe.capacity.context, recipe.capacity.branches)
        sources.append(GraphSource(index, section, config, head, tree, *keeps))
    return sources


def taps(sources: Sequence[GraphSource]) -> tuple[int, ...]:
    """Return the target's layers whose incoming residual streams any head reads, ascending; empty without heads."""
    return tuple(sorted({i for s in sources if not isinstance(s.config, DecoderConfig) for i in s.config.aux_layers}))


def feature_columns(source: GraphSource, tapped: Sequence[int], width: int) -> tuple[int, ...] | None:
    """Return which of the target's features a head reads, in the head's order; None where it reads all as they lie.

    The features are the streams of the layers `tapped` side by side, each `width` numbers.
    """
    if isinstance(source.config, DecoderConfig) or source.config.aux_layers == tuple(tapped):
        return None
    return tuple(tapped.index(layer) * width + i for layer in source.config.aux_layers for i in range(width))


def source_hashes(recipe: Recipe) -> dict[str, str]:
    """Return the sha256 of every file of a recipe that makes weights, by file name; a drafter's begin with `name/`.

    Where weights are searched on text, `calibration` is the hash of that text and of the tokenizer that reads it.
    """
    target = checkpoint_hashes(recipe.checkpoint_path)
    tokenizer = target.get(TOKENIZER_FILE)
    found = target | _calibration_hash(recipe, recipe.target.weights, tokenizer)
    for section in recipe.drafters:
        if not isinstance(section, HostDrafter):
            files = checkpoint_hashes(recipe.drafter_path(section))
            files |= _calibration_hash(recipe, section.weights, tokenizer)
            found |= {f"{section.name}/{file}": sha for file, sha in files.items()}
    return found


def _calibration_hash(recipe: Recipe, weights: WeightsSection | None, tokenizer: str | None) -> dict[str, str]:
    path = recipe.calibration_path(weights)
    try:
        return {} if path is None else {"calibration": digest([file_sha256(path), tokenizer])}
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}); correct the path of the calibration") from None


def manifest_drafters(recipe: Recipe, sources: Sequence[GraphSource]) -> tuple[Drafter, ...]:
    """Return every drafter of the recipe as the manifest has it, in the recipe's order."""
    graphs = {source.index: source.drafter for source in sources}
    return tuple(
        section if isinstance(section, HostDrafter) else graphs[index] for index, section in enumerate(recipe.drafters)
    )


def defer(recipe: Recipe, source: GraphSource, target: Decoder, dtype: WeightType) -> nn.Module:
    """Return the drafter's model in `dtype`, which is the dtype of `target`, ready for `export_draft`.

    Its graph reads its weights as it is written.
    """
    section = source.section
    if isinstance(section, ModelSection):
        path = recipe.drafter_path(section)
        return DecoderDraft(defer_decoder(path, dtype, section.scaling, recipe.capacity.context))
    assert source.head is not None, "of a head"
    head = source.head.defer(dtype)
    return Eagle3Draft(head, target.embedding) if isinstance(head, Eagle3Head) else BlockDraft(head, target)


def _tree(section: GraphSection, config: DecoderConfig | HeadConfig, device: Device) -> Tree:
    if section.tree is not None:
        deepest = config.drafted - 1 if isinstance(config, BlockConfig) else None
        return resolve_tree(section.tree, device, deepest).tree()
    gamma = section.gamma or (config.drafted if isinstance(config, BlockConfig) else CHAIN)
    return Tree(top_k=1, depth=gamma - 1, nodes=gamma + 1)


def _check_model(
    recipe: Recipe, index: int, section: ModelSection, config: DecoderConfig, target: DecoderConfig
) -> None:
    """Raise `RecipeError` for a draft model that has other tokens than the target, or too few positions."""
    served, context = positions_served(config, replaced=section.rope_scaling is not None), recipe.capacity.context
    if config.vocab_size != target.vocab_size:
        said = (
            f"has a vocabulary of {config.vocab_size} tokens, the target one of {target.vocab_size}; a draft model "
            "must share the target's tokenizer"
        )
    elif (differing := _differing_token(recipe.checkpoint_path, recipe.drafter_path(section))) is not None:
        said = f"has a tokenizer in which {differing}; a draft model must share the target's tokenizer"
    elif context > served:
        said = (
            f"is made for {served} positions, fewer than capacity.context {context}; lower that, or stretch the "
            f"drafter with drafters[{index}].rope_scaling"
        )
    else:
        return
    raise recipe.error(("drafters", index, "checkpoint"), said)


def _differing_token(target: Path, drafter: Path) -> str | None:
    """Say which id is another token, where both have a tokenizer: of such a drafter nothing is accepted."""
    wanted, own = read_vocabulary(target), read_vocabulary(drafter)
    if wanted is not None and own is not None:
        for token, number in own.items():
            if wanted.get(token) != number:
                return f"{token!r} is token {number}, in the target's it is {wanted.get(token)}"
    return None
