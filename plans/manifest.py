"""`plan.json`: what a plan holds. Read by the runtime, written by the compiler, validated by Pydantic."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.plans import names
from outrider.plans.buffers import LARGEST_SIZE, Strict, Tensor
from outrider.plans.partial_kv import PartialKv

FORMAT_VERSION = 19

LEAST_NGRAM_MEMORY, MOST_NGRAM_MEMORY = 1024, 2**24  # tokens: a few texts with their leads, and 2.5 GiB

Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]


class Convolutions(Strict):
    """Sizes of the convolutions of a model, each over the last `kernel` tokens of a path, and of the states that they
    keep for each branch: the tokens before some position, and `log` records after it."""

    layers: Size
    channels: Size
    kernel: Annotated[int, Field(ge=2, le=16)]
    log: Size


class Geometry(Strict):
    """Sizes of one model, in elements, and of the KV cache that serves it, in tokens.

    `feature_size` is the width of the features that the target gives, 0 where no drafter reads them.
    """

    layers: Size = Field(description="Layers that attend, each with a KV cache.")
    heads: Size
    kv_heads: Size
    head_dim: Size
    hidden_size: Size
    vocab_size: Size
    feature_size: Count = 0
    context: Size = Field(description="Tokens a sequence may hold.")
    view_bucket: Size = Field(description="Keys in view are rounded up to a multiple of this.")
    capacity: Size = Field(description="Slots of the KV cache: the context and its headroom.")
    prefill_chunk: Size = Field(description="Most prompt tokens of one step.")
    branches: Size
    rows: Size = Field(1, description="Rows of the KV cache: 1, or one for each branch.")
    layer_windows: tuple[Count, ...] = Field(
        (), description="By layer, the last tokens of a sequence that it sees; 0: all. Empty: every layer sees all."
    )
    convolutions: Convolutions | None = Field(None, description="Of layers that convolve in place of attending.")
    sink: Count = Field(0, description="Of a drafter with a window: slots of the beginning that are kept.")
    window: Count = Field(0, description="Last slots that a drafter's KV cache keeps, at least; 0: all.")

    @property
    def widest_window(self) -> int:
        """The largest window of a layer, in tokens; 0 where every layer sees all."""
        return max(self.layer_windows, default=0)

    @property
    def held(self) -> int:
        """Slots that there is room for, those of a draft's levels not counted."""
        return self.sink + 2 * self.window if self.window else self.context


ToolParser = Literal["hermes", "llama", "json"]


class Text(Strict):
    """The tokenizer, which turns text into tokens and back. Files lie in `tokenizer/`.

    `special_tokens` are the texts that chat templates print by name, such as `bos_token`. `tool_parser` is the format
    in which the model writes calls of tools; None: as its chat template prints them.
    """

    eos_token_ids: tuple[int, ...]
    tool_parser: ToolParser | None = None
    special_tokens: dict[str, str] = Field(default_factory=dict)


class NgramDrafter(Strict):
    """The n-gram drafter's settings. The drafter itself checks their limits.

    Where it foresees fewer than `least` tokens, the drafter named `otherwise` has the round, if there is one. It drafts
    from a memory of earlier outputs too, of at most `memory` tokens; 0 is none.
    """

    kind: Literal["ngram"]
    name: str
    max_context: Count
    min_context: Count
    max_draft: Count
    min_confidence: float
    filler_top_k: Count
    otherwise: str | None = None
    least: Size = 1
    memory: Count = 0


class Tree(Strict):
    """A draft tree's static shape: `top_k` children of a node and nodes of a frontier, `depth` expansions after the
    root's own, `nodes` with the root."""

    top_k: Size
    depth: Count
    nodes: Annotated[int, Field(ge=2, le=LARGEST_SIZE)]

    @property
    def candidates(self) -> int:
        """Nodes that are scored, of which the best become the tree."""
        return self.top_k + self.depth * self.top_k**2


class Taps(Strict):
    """The target's layers whose incoming residual streams a head reads, and what said so. For the reader: the engines
    have them built in."""

    layers: Annotated[tuple[Count, ...], Field(min_length=1)]
    reason: str


class GraphDrafter(Strict):
    """A drafter that is an engine of its name, with a KV cache of its own: the model of its name. Of its drafts, nodes
    less likely to be accepted than `least_chance` (by default 0.2 on a CPU, 0 on a GPU) are left out where several
    sequences share a pass without prices.

    `eagle3`: slot i pairs the target's feature of token i with token i + 1. `block`: slot i is made of that feature
    alone, and a draft runs a `block` of slots after them. `model`: slot i is token i.
    """

    kind: Literal["eagle3", "block", "model"]
    name: str
    tree: Tree
    least_chance: Annotated[float, Field(ge=0, lt=1)] | None = None
    block: Size | None = None
    acceptance: Literal["coupled", "rejection"] = "coupled"
    taps: Taps | None = None

    @property
    def reads_features(self) -> bool:
        """Whether it is a head, which reads the target's features."""
        return self.kind != "model"

    @property
    def longest(self) -> int:
        """Most nodes after a tip."""
        return self.tree.nodes - 1

    @property
    def longest_path(self) -> int:
        """Most nodes that lie one after another."""
        return min(self.tree.depth + 1, self.tree.nodes - 1)

    @property
    def grown(self) -> int:
        """Most slots that drafting fills of its KV cache after the tip's."""
        return self.tree.depth * self.tree.top_k if self.block is None else self.block

    @property
    def compacts(self) -> bool:
        """Whether the KV of accepted nodes stays, and does not lie together: a head's hold hidden states of its own
        instead of the target's features, a chain's are in place."""
        return self.kind == "model" and self.tree.top_k > 1 and self.grown > 0


Drafter = Annotated[NgramDrafter | GraphDrafter, Field(discriminator="kind")]


def longest_draft(drafters: Iterable[Drafter]) -> int:
    """Most nodes that any of them hangs after a tip."""
    return max((d.max_draft if isinstance(d, NgramDrafter) else d.longest for d in drafters), default=0)


def rejects(drafters: Iterable[Drafter]) -> bool:
    """Whether any of them is accepted by rejection."""
    return any(isinstance(d, GraphDrafter) and d.acceptance == "rejection" for d in drafters)


def deciding_engines(drafters: Iterable[Drafter]) -> list[str]:
    """Engines whose results tokens depend on: the target's, and those of drafters that are accepted by rejection.

    What other drafters propose decides how many tokens a pass commits, and never which.
    """
    return [names.TARGET, *(drafter.name for drafter in drafters if rejects([drafter]))]


class StageKind(StrEnum):
    OP = "op"  # one of our ops, by schema name
    ENGINE = "engine"  # one of the target's engines, by name


class Stage(Strict):
    """One step of a program. `inputs` and `outputs` map the stage's own tensor names to buffers.

    `model` names the model whose sizes the stage runs with: its new tokens, its view, its logits. A tensor may be
    shorter than its buffer in the first dimension: it lies at the start.
    """

    kind: StageKind
    run: str
    model: str = names.TARGET
    inputs: dict[str, str] = Field({})
    outputs: dict[str, str] = Field({})
    attributes: dict[str, int | float] = Field({})


class Results(Strict):
    """Buffers in which a program leaves results for the host."""

    tokens: str
    counts: str | None = Field(None, description="Committed tokens per tree; absent: one per tree.")
    kept: str | None = Field(None, description="New tokens whose KV stays, compacted; absent: all, in place.")


class Program(Strict):
    stages: tuple[Stage, ...]
    results: Results | None = None


class Range(Strict):
    """Sizes that a symbol may have in a step."""

    least: Size
    most: Size


class Profile(Strict):
    """Ranges of symbols that an engine has kernels for. Symbols that are not named are free."""

    symbols: dict[str, Range]


class Engine(Strict):
    """One compiled graph. `aliases` maps an output to the input whose memory it is bound to.

    What is built for certain devices by a builder of its own says so: only that version of it may load the file, or,
    where `version_compatible`, a later one with the same first number. `holds` names ops that programs have no stages
    for around it.
    """

    file: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    aliases: dict[str, str] = Field({})
    weight_bytes: Annotated[int, Field(ge=0, lt=2**63, description="What a pass reads of weights, at most.")] = 0
    profiles: tuple[Profile, ...] = Field((), description="Absent: shapes may be of any size.")
    builder: str | None = Field(None, description="Library and version that built the file, and must load it.")
    version_compatible: bool = Field(False, description="Whether later versions of the builder may load the file.")
    devices: tuple[str, ...] = Field(
        (), description="Compute capabilities that it was built for, such as sm_80; sm_80+: that one and all above it."
    )
    gpu: str | None = Field(None, description="Name of the one kind of GPU that may run it.")
    rectangular: bool = Field(
        False,
        description="Whether rows are computed as a rectangle: slots after a row's new ones get KV of no token, up to "
        "the length of the step's longest row.",
    )
    holds: tuple[str, ...] = Field((), description="Our ops that it runs itself, in a program's place.")
    layers: dict[str, int] = Field({}, description="Layers by kind, where the file does not show them.")
    front_end: str | None = Field(None, description="What the builder had the graph read by, and why not as asked for.")

    @property
    def keeps_levels(self) -> bool:
        """Whether the levels of a draft leave KV in the cache: later passes than the first have cache outputs."""
        later = names.cache_output(names.k_cache(0), 1)
        return any(tensor.name == later for tensor in self.outputs)


class Probe(Strict):
    """A graph of single ops of the engines, which shows whether their results depend on the company of a row.

    Inputs are float32. One dimension of every output, and of every input but those that are the same for all rows, is
    `names.PROBED`. Row i of an output must depend on row i of the inputs alone, bit for bit, in any number of rows.
    """

    file: str
    ops: dict[str, str] = Field(description="By output: the engine and the op that it comes from, for the reader.")


class RuleReport(Strict):
    """The effect of one lowering rule on one engine's graph."""

    engine: str
    rule: str
    applied: int
    declined: dict[str, int] = Field({}, description="Reason to count.")


class View(Strict):
    """A tensor that is one plane of a buffer: `buffer[plane]`."""

    buffer: str
    plane: Annotated[int, Field(ge=0)]


class Buckets(Strict):
    """Sizes that steps are rounded up to, ascending, so that they come again: `new` tokens and keys in `view`.

    Steps with more new tokens have the size that they have. The last view is the largest. A step that gives each of
    several sequences a token, and drafts nothing, has a size of `batch`.
    """

    new: Annotated[tuple[Size, ...], Field(min_length=1)]
    batch: tuple[Size, ...] = ()
    view: Annotated[tuple[Size, ...], Field(min_length=1)]


class BackendPlan(Strict):
    """Everything for one backend."""

    engines: dict[str, Engine]
    engines_key: str = Field(description="Hash of all that the engines depend on; equal keys, equal engines.")
    buffers: tuple[Tensor, ...]
    views: dict[str, View] = Field({})
    symbols: dict[str, dict[str, Size]] = Field(description="By model: the largest value of every symbol.")
    buckets: dict[str, Buckets] = Field({}, description="By model, where a step has few sizes, so that it is recorded.")
    programs: dict[str, Program]
    lowering: tuple[RuleReport, ...] = ()
    probe: Probe | None = Field(None, description="Where a row's result is promised to depend on the row alone.")
    kernels: dict[str, str] = Field({}, description="Our ops compiled for a device: architecture (sm_90) to file.")


class PlanFile(Strict):
    """A file of the plan; `path` is relative, with forward slashes."""

    path: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, lt=2**63)]


class Manifest(Strict):
    format_version: int
    name: str
    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    recipe: dict[str, Any] = Field(description="The resolved recipe, which `outrider verify` compares.")
    source: str = Field(description="Where the recipe lay, relative to the plan; no part of the identity.")
    models: dict[str, Geometry] = Field(description="`target`, and every drafter that has a KV cache.")
    text: Text
    drafters: tuple[Drafter, ...]
    partial_kv: PartialKv | None = Field(None, description="Absent: every pass reads the full KV cache.")
    backends: dict[str, BackendPlan]
    tools: dict[str, str]
    files: tuple[PlanFile, ...]

    @property
    def target(self) -> Geometry:
        """The model whose output counts."""
        return self.models[names.TARGET]
