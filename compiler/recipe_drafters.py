"""The drafters' sections of a recipe: one class per kind."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.compiler.models.config_reader import RopeTheta
from outrider.compiler.models.eagle3_config import Eagle3Overrides
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.recipe_sections import RopeScalingSection, Section, WeightsSection, WrittenPath
from outrider.plans.buffers import Name
from outrider.plans.host_drafters import NAME, HostDrafter, HostDrafterKind
from outrider.plans.manifest import Tree


class TreeSection(Section):
    """A draft tree's shape. On a CPU small trees pay; `outrider tune` measures which."""

    top_k: int = Field(ge=1, le=32, description="children of a node, and nodes that each level expands")
    depth: int = Field(ge=0, le=32, description="levels after the root's children")
    nodes: int = Field(ge=2, le=256, description="nodes that the target verifies, the root included")

    @model_validator(mode="after")
    def _enough_candidates(self) -> Self:
        most = 1 + self.tree().candidates
        if self.nodes > most:
            context = {"value": self.nodes, "most": most}
            raise PydanticCustomError("tree", "has {value} nodes, but grows only {most}; lower nodes", context)
        return self

    def tree(self) -> Tree:
        return Tree(top_k=self.top_k, depth=self.depth, nodes=self.nodes)


AUTO_TREES = {
    "cpu": TreeSection(top_k=3, depth=2, nodes=8),  # it verifies few nodes cheaply: 8 cost 1.1 to 1.8 times one
    "gpu": TreeSection(top_k=10, depth=7, nodes=60),  # that of EAGLE-3 (arXiv 2503.01840)
}
Device = Literal["cpu", "gpu"]


def _check_word(written: object) -> object:
    if isinstance(written, str) and written != "auto":
        raise PydanticCustomError("tree", "must be {top_k, depth, nodes}, or auto")
    return written


TreeKey = Annotated[
    Annotated[TreeSection, Tag(":shape")] | Annotated[Literal["auto"], Tag(":auto")],
    Discriminator(lambda written: ":auto" if isinstance(written, str) else ":shape"),
    BeforeValidator(_check_word),
]


def resolve_tree(written: TreeSection | Literal["auto"], device: Device, deepest: int | None = None) -> TreeSection:
    """Return the tree of a recipe's key; an auto one has at most `deepest` levels below the root's children."""
    if written != "auto":
        return written
    found = AUTO_TREES[device]
    if deepest is None or deepest >= found.depth:
        return found
    shallow = Tree(top_k=found.top_k, depth=deepest, nodes=found.nodes)
    return TreeSection(top_k=found.top_k, depth=deepest, nodes=min(found.nodes, 1 + shallow.candidates))


class _EngineSection(Section):
    """A drafter with an engine."""

    name: Name = Field(description=NAME)
    kind: str
    checkpoint: WrittenPath
    weights: WeightsSection | None
    tree: TreeKey | None = Field(
        None,
        description="drafts a tree: {top_k, depth, nodes}, or auto; without it (and without `gamma`), a chain of 5",
    )
    least_chance: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="in passes of several sequences, nodes that are less likely to be accepted than this are not "
        "verified, unless measured prices of passes decide (by default 0.2 on a CPU, 0 on a GPU)",
    )
    acceptance: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="coupled: the same seed gives the same tokens as without drafts; rejection: classical speculative "
        "sampling, for chains, the same distribution only",
    )

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if getattr(self, "gamma", None) is not None and self.tree is not None:
            raise PydanticCustomError(
                "gamma", "stands beside tree; a draft is a chain or a tree, keep one of them", {"at": ("gamma",)}
            )
        return self


class _HeadSection(_EngineSection):
    """A head on the target's features."""

    checkpoint: WrittenPath = Field(description="folder of the head's checkpoint, relative to the recipe")
    weights: WeightsSection | None = Field(None, description="quantised weights; without it they are of `target.dtype`")

    @field_validator("weights")
    @classmethod
    def _not_searched(cls, value: WeightsSection | None) -> WeightsSection | None:
        if value is not None and value.method == "awq":
            raise PydanticCustomError(
                "method",
                "is awq, which searches on text, and a head reads the target's features; leave it and calibration out",
                {"at": ("method",)},
            )
        return value


class Eagle3Section(_HeadSection):
    """An EAGLE3 head: drafts from the target's own features."""

    kind: Literal["eagle3"] = Field(description="the kind of drafter")
    tree: TreeKey = Field("auto", description="{top_k, depth, nodes}, or auto")
    rope_theta: RopeTheta | None = Field(
        None, description="replaces the checkpoint's base; heads of EAGLE and AngelSlim are trained with 10000"
    )
    aux_layers: tuple[int, int, int] | None = Field(
        None,
        strict=False,
        description="layers of the target whose incoming hidden states the head reads, in place of those its "
        "config.json names: projects count them differently, and `inspect` shows which are read and why",
    )
    norm_output: bool | None = Field(
        None,
        description="replaces the checkpoint's norm_output; false for heads that SpecForge trained with "
        "norm_output: true between July and September 2026, as plain EAGLE3",
    )

    @property
    def overrides(self) -> Eagle3Overrides:
        """The values that replace keys of the head's config.json."""
        return Eagle3Overrides(self.rope_theta, self.aux_layers, self.norm_output)


class BlockSection(_HeadSection):
    """A block head (DFlash, DSpark, JetSpec): drafts a block of tokens in one pass, from the target's own features."""

    kind: Literal["block"] = Field(description="the kind of drafter")
    gamma: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None, description="drafts a chain of this many tokens; without it, of all that a block of the head drafts"
    )
    tree: TreeKey | None = Field(
        None,
        description="drafts a tree in place of `gamma`: {top_k, depth, nodes}, or auto; depth is less than a block's "
        "tokens",
    )


class ModelSection(_EngineSection):
    """A small decoder with the target's vocabulary."""

    kind: Literal["model"] = Field(description="the kind of drafter")
    checkpoint: WrittenPath = Field(
        description="folder of a Hugging Face checkpoint, or a GGUF file, relative to the recipe"
    )
    weights: WeightsSection | None = Field(
        None, description="quantised weights; without it they are of `target.dtype`, or the checkpoint's own integers"
    )
    gamma: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None, description="drafts a chain of this many tokens, and takes as much longer to build"
    )
    rope_scaling: RopeScalingSection | None = Field(None, description="replaces the checkpoint's own rotary scaling")

    @property
    def scaling(self) -> RopeScaling | None:
        """The rotary scaling that replaces the checkpoint's; None to keep the checkpoint's."""
        return None if self.rope_scaling is None else self.rope_scaling.scaling()


GraphSection = Eagle3Section | BlockSection | ModelSection
DrafterSection = Annotated[HostDrafterKind | Eagle3Section | BlockSection | ModelSection, Field(discriminator="kind")]


def reshaped(section: DrafterSection, name: str, shape: Tree | int) -> dict[str, JsonValue]:
    """Return the same drafter as recipe data under another name, with `shape`: a tree or, on the host, the most nodes
    of a draft, to which `least` is lowered where it is more."""
    if isinstance(section, HostDrafter):
        assert isinstance(shape, int), "the most nodes of a draft"
        least = min(section.least, shape)
        return section.model_dump(mode="json") | {"name": name, "max_draft": shape, "least": least}
    assert isinstance(shape, Tree), "an engine's draft has a tree"
    same = section.model_dump(mode="json", exclude_none=True, exclude={"name", "gamma", "tree"})
    return same | {"name": name, "tree": shape.model_dump()}
