"""The design of a plan, computed from its recipe before anything is built: drafters, geometry, sizes, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from outrider.compiler import drafters
from outrider.compiler.backends.base import Backend
from outrider.compiler.drafters import GraphSource
from outrider.compiler.models.config import DecoderConfig, WeightType
from outrider.compiler.models.mixers import DeltaConfig
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import Recipe, check_capacity
from outrider.compiler.recipe_source import Location
from outrider.plans import names
from outrider.plans.backends import Feature
from outrider.plans.buffers import Tensor
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import (
    Drafter,
    Geometry,
    GraphDrafter,
    MatrixStates,
    States,
    View,
    longest_draft,
    rejects,
)
from outrider.plans.partial_kv import PartialKv
from outrider.plans.step_buffers import (
    drafter_buffers,
    partial_buffers,
    sampling_buffers,
    state_shapes,
    status_buffers,
    target_buffers,
)

VIEW_BUCKET = 128  # keys: coarse enough that sizes rarely change, fine enough that masks stay short
_KEPT_FEATURES = 128  # tokens that a head which is not asked may lack
_BEAMS = 8  # beams that every plan serves, with any drafters
_NODES_OF_A_BRANCH = 8  # a branch's tip and a short draft, when all branches take part in a step
_TENTATIVE_OF_A_ROW = 32  # most tentative tokens of a row that count, where there are several rows


@dataclass(frozen=True)
class PlanDesign:
    """The parts of a plan that do not depend on its engines. `sources` are the drafters that have an engine."""

    recipe: Recipe
    config: DecoderConfig
    sources: tuple[GraphSource, ...]
    drafters: tuple[Drafter, ...]
    target: Geometry
    partial: PartialKv | None

    @cached_property
    def models(self) -> dict[str, Geometry]:
        """Geometry by model, the target first."""
        return {names.TARGET: self.target} | {each.section.name: each.geometry(self.target) for each in self.sources}

    @property
    def searched_layers(self) -> int:
        """Layers whose weights are searched on text."""
        weights = [(self.config, self.recipe.target.weights)]
        weights += [
            (each.config, each.section.weights) for each in self.sources if isinstance(each.config, DecoderConfig)
        ]
        return sum(config.num_layers for config, form in weights if form is not None and form.method == "awq")

    @cached_property
    def limits(self) -> dict[str, dict[str, int]]:
        """Largest value of every symbol, by model."""
        target = symbol_limits(self.target, self.drafters, self.partial)
        limits = {names.TARGET: target}
        for each in self.sources:
            name = each.section.name
            limits[name] = drafter_limits(each.drafter, self.models[name], target)
        return limits

    @cached_property
    def views(self) -> dict[str, View]:
        """Named parts of buffers: each layer's K, V and queries."""
        views: dict[str, View] = {}
        for model, geometry in self.models.items():
            views |= cache_views(model, geometry)
        views |= state_views(self.target)
        if self.partial is not None:
            views |= cache_views(names.PARTIAL, self.target) | query_views(self.target)
        return views

    def buffers(self, backend: Backend) -> tuple[Tensor, ...]:
        """Buffers of a runtime Engine on `backend`."""
        kv = self.recipe.kv_dtype(backend)
        buffers = [
            *target_buffers(self.target, kv, rejection=rejects(self.drafters)),
            *(() if self.partial is None else partial_buffers(self.target, self.partial, kv)),
            *sampling_buffers(self.target.branches),
            *(status_buffers() if backend.holds_ops else ()),
        ]
        for source in self.sources:
            buffers += drafter_buffers(source.drafter, self.models[source.section.name], self.target, kv)
        return tuple(buffers)

    def engine_shape(self, backend: Backend) -> dict[str, object]:
        """Settings that a backend's engines depend on, beside weights and tools."""
        scaling = self.recipe.target.rope_scaling
        return {
            "backend": backend.model_dump(mode="json"),
            "limits": self.limits if backend.bounded else None,
            "capacity": self.target.capacity,
            "dtype": self.recipe.dtype(backend),
            "kv_cache": self.recipe.kv_dtype(backend),
            "weights": [
                None if section.weights is None else section.weights.model_dump(exclude={"calibration"})
                for section in (self.recipe.target, *(each.section for each in self.sources))
            ],
            "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
            "drafters": [
                [each.drafter.model_dump(), self.models[each.section.name].capacity, repr(each.config)]
                for each in self.sources
            ],
            "branches": self.target.branches if self.sources or self.target.states else 1,
            "states": self.target.states and self.target.states.model_dump(),
            "rows": self.target.rows,
            "partial": self.recipe.partial_kv.enabled,
        }


def design_plan(recipe: Recipe) -> PlanDesign:
    """Read the checkpoints' configurations and design the plan.

    Raises `CheckpointError`, and `RecipeError` naming the key that asks for something no plan can do.
    """
    config = read_config(recipe.checkpoint_path, recipe.rope_scaling, recipe.capacity.context)
    check_capacity(recipe, config)
    _check_served(recipe)
    sources = tuple(drafters.read_sources(recipe, config))
    _check_experts(recipe, config, sources)
    listed = drafters.manifest_drafters(recipe, sources)
    _check_states(recipe, config, sources)
    target, partial = _geometry(recipe, config, sources, listed), recipe.partial_kv.settings()
    if partial is not None:
        _check_partial(recipe, target, listed, partial)
    return PlanDesign(recipe, config, sources, listed, target, partial)


def _geometry(
    recipe: Recipe, config: DecoderConfig, sources: Sequence[GraphSource], listed: Sequence[Drafter]
) -> Geometry:
    context = recipe.capacity.context
    rounded = -(-context // VIEW_BUCKET) * VIEW_BUCKET
    return Geometry(
        layers=len(config.attention_layers),
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        feature_size=config.hidden_size * len(drafters.taps(sources)),
        context=context,
        view_bucket=VIEW_BUCKET,
        capacity=rounded + VIEW_BUCKET,
        prefill_chunk=recipe.capacity.prefill_chunk,
        branches=recipe.capacity.branches,
        rows=recipe.capacity.branches if recipe.capacity.batching else 1,
        layer_windows=config.windows_within(context),
        states=_states(config, 1 + max(_NODES_OF_A_BRANCH, longest_draft(listed))),
    )


def _states(config: DecoderConfig, log: int) -> States | None:
    mixer = config.mixer
    if mixer is None:
        return None
    matrices = None
    if isinstance(mixer, DeltaConfig):
        matrices = MatrixStates(heads=mixer.heads, keys=mixer.keys, values=mixer.values, record=mixer.record)
    channels = mixer.channels(config.hidden_size)
    layers = len(config.mixer_layers)
    return States(layers=layers, log=log, channels=channels, kernel=mixer.kernel, matrices=matrices)


def symbol_limits(geometry: Geometry, drafters: Sequence[Drafter], partial: PartialKv | None = None) -> dict[str, int]:
    """Return the largest value of each symbol of the target: a full prefill chunk with the longest draft after it.

    With partial KV, tentative tokens may be longer than any draft. A step of beam search needs the logits of every
    beam, so there is room for some even without drafts.
    """
    tentative = 0 if partial is None else partial.n_spec_tokens_buf
    nodes_of_all = geometry.branches * _NODES_OF_A_BRANCH
    if geometry.rows > 1:  # every row may have tentative tokens to confirm
        nodes_of_all = max(nodes_of_all, geometry.rows * (1 + min(tentative, _TENTATIVE_OF_A_ROW)))
    nodes = max(1 + max(longest_draft(drafters), tentative), _BEAMS, nodes_of_all)
    # With rejection, tokens depend on the draft, so every branch has room for a whole draft.
    nodes = max(nodes, *(geometry.branches * (1 + longest_draft([d])) for d in drafters if rejects([d])), 0)
    grown = max((d.tree.nodes for d in drafters if isinstance(d, GraphDrafter)), default=0) * geometry.branches
    new = max(geometry.prefill_chunk + nodes - 1, grown)
    kept = _KEPT_FEATURES if geometry.feature_size else 0
    return _limits(geometry, new, nodes, new + kept + (geometry.branches > 1))


def drafter_limits(drafter: GraphDrafter, geometry: Geometry, target: Mapping[str, int]) -> dict[str, int]:
    """Return the largest value of each symbol of a drafter: a step computes one prefill chunk of the target, or, with
    several branches, the target's whole step.
    """
    new = geometry.prefill_chunk if geometry.branches == 1 else target[names.NEW]
    trees = {names.TIPS: geometry.branches, names.GROWN: geometry.branches * drafter.tree.nodes}
    return _limits(geometry, new, 1, target[names.FEATURED]) | trees


def _limits(geometry: Geometry, new: int, picked: int, featured: int) -> dict[str, int]:
    return {
        names.NEW: new,
        names.VIEW: geometry.capacity - geometry.view_bucket,
        names.LOGITS: picked,
        names.ROWS: geometry.rows,
        names.ROW_EDGES: geometry.rows + 1,
        names.PLACES: new,
        names.FEATURED: featured,
        names.TIPS: 1,
        names.GROWN: 1,
    }


def cache_views(model: str, geometry: Geometry) -> dict[str, View]:
    """Return each layer's K and V as planes of the one `kv` buffer, so that an op moves slots of all layers at once."""
    views = {}
    for layer in range(geometry.layers):
        for plane, cache in enumerate((names.k_cache(layer), names.v_cache(layer))):
            views[names.buffer_name(model, cache)] = View(
                buffer=names.buffer_name(model, names.KV), plane=2 * layer + plane
            )
    return views


def state_views(geometry: Geometry) -> dict[str, View]:
    """Return each layer's states and their logs as planes of a buffer each."""
    layers = range(geometry.states.layers if geometry.states is not None else 0)
    return {
        names.buffer_name(names.TARGET, names.of_layer(whole, layer)): View(
            buffer=names.buffer_name(names.TARGET, whole), plane=layer
        )
        for whole in state_shapes(geometry)
        for layer in layers
    }


def query_views(geometry: Geometry) -> dict[str, View]:
    """Return each layer's queries as a plane of one buffer, which an op reads as a whole."""
    whole = names.buffer_name(names.TARGET, names.QUERIES)
    return {
        names.buffer_name(names.TARGET, names.queries(layer)): View(buffer=whole, plane=layer)
        for layer in range(geometry.layers)
    }


def check_feature(recipe: Recipe, feature: Feature, key: Location, clause: str, advice: str) -> None:
    """Raise `RecipeError` where a backend of the recipe lacks `feature`, which `key` asks for, as `clause` says."""
    for backend in recipe.backends:
        if (reason := backend.support.lacks.get(feature)) is not None:
            raise recipe.error(key, f"{clause}, and {backend.kind} {reason}: {advice}, or leave that backend out")


def _check_served(recipe: Recipe) -> None:
    """Raise `RecipeError` naming the first key that asks for something that a backend of the recipe lacks."""
    if recipe.capacity.batching:
        advice = "set it to false, for branches in one row"
        check_feature(recipe, "batching", ("capacity", "batching"), "is true", advice)
    if recipe.partial_kv.enabled:
        check_feature(recipe, "partial KV", ("partial_kv", "enabled"), "is true", "set it to false")
    for place, drafter in enumerate(recipe.drafters):
        if not isinstance(drafter, HostDrafter) and drafter.acceptance == "rejection":
            key = ("drafters", place, "acceptance")
            check_feature(recipe, "rejection", key, "is rejection", "leave it coupled")
    for index, backend in enumerate(recipe.backends):
        own = recipe.dtype(backend)
        if own not in backend.support.weights:
            floats = " or ".join(name for name in get_args(WeightType) if name in backend.support.weights)
            raise recipe.error(
                ("target", "dtype") if backend.dtype is None else ("backends", index, "dtype"),
                f"is {own}; {backend.kind} computes in {floats}: set it to {floats} (a checkpoint in any of the types "
                "is read), and give other backends a dtype of their own in their sections",
            )
        kept = dict.fromkeys((own, *backend.support.kv_types))
        if recipe.kv_cache is not None and recipe.kv_cache not in kept:
            raise recipe.error(
                ("kv_cache",),
                f"is {recipe.kv_cache}; {backend.kind} keeps keys and values in {' or '.join(kept)} here: leave "
                "kv_cache out, or build this backend by a recipe of its own",
            )


def _check_experts(recipe: Recipe, config: DecoderConfig, sources: Sequence[GraphSource]) -> None:
    """Raise `RecipeError` where a model has layers of experts and a backend has no kernels for them."""
    models: list[tuple[Location, object]] = [(("target",), config)]
    models += [(("drafters", each.index), each.config) for each in sources]
    for place, model in models:
        if isinstance(model, DecoderConfig) and model.experts is not None:
            key, clause = (*place, "checkpoint"), "is a model with layers of experts"
            check_feature(recipe, "experts", key, clause, "use another backend for it, such as onnxruntime-cuda")


def _check_states(recipe: Recipe, config: DecoderConfig, sources: Sequence[GraphSource]) -> None:
    """Raise `RecipeError` where a model keeps states and a backend has no kernels for them, or the recipe asks for what
    they cannot do yet."""
    for each in sources:
        if isinstance(each.config, DecoderConfig) and each.config.mixer is not None:
            raise recipe.error(
                ("drafters", each.index, "checkpoint"),
                "is a model with recurrent states, and each level of a draft would need those of the level before in "
                "one graph: use a draft model of attention layers alone, or an n-gram drafter",
            )
    if config.mixer is None:
        return
    clause = "is a model whose layers keep states"
    check_feature(recipe, "recurrent states", ("target", "checkpoint"), clause, "use onnxruntime-cpu")
    if recipe.partial_kv.enabled:
        raise recipe.error(
            ("partial_kv", "enabled"),
            "is true, but layers of the target keep states, which tokens over the partial KV cache would need a second "
            "of: set it to false",
        )


def _check_partial(recipe: Recipe, geometry: Geometry, drafters: Sequence[Drafter], partial: PartialKv) -> None:
    """Check that the partial KV cache is large enough for windows of layers and for a step, and no larger than the full
    one.

    Raises `RecipeError`, naming the key.
    """
    _check_reach(recipe, geometry, partial)
    step, chunk = 1 + longest_draft(drafters), geometry.prefill_chunk
    waiting, window = partial.n_spec_tokens_buf, recipe.partial_kv.n_draft_window_tokens
    checks = (
        (
            waiting < step + 1, "n_spec_tokens_buf",
            f"is {waiting}, but a step of the plan's drafters has up to {step} tokens, and one more must fit; raise it "
            f"to {step + 1} or more",
        ),
        (
            waiting > chunk, "n_spec_tokens_buf",
            f"is {waiting}, but what waits there goes into one pass over the full KV cache, which takes at most "
            f"capacity.prefill_chunk, {chunk}; lower it, or raise that",
        ),
        (
            isinstance(partial.budget, int) and partial.budget > partial.n_retrieval_blocks, "budget",
            f"is {partial.budget}, but partial_kv.n_retrieval_blocks leaves room for {partial.n_retrieval_blocks}; "
            "lower it, or raise that",
        ),
        (
            max(partial.partial_threshold, 1) >= geometry.context, "partial_threshold",
            f"is {partial.partial_threshold}, and no context of the plan is longer than {geometry.context}; lower it, "
            "or raise capacity.context",
        ),
        (
            partial.largest > geometry.capacity, "n_retrieval_blocks",
            f"is {partial.n_retrieval_blocks}, which makes {partial.largest} tokens with sink, window and buffer, more "
            f"than the full KV cache's {geometry.capacity}; lower it, or raise capacity.context",
        ),
        (
            geometry.branches == 1 and window < chunk, "n_draft_window_tokens",
            f"is {window}, less than capacity.prefill_chunk, {chunk}, which a drafter computes at once; raise it",
        ),
    )  # fmt: skip
    for wrong, key, said in checks:
        if wrong:
            raise recipe.error(("partial_kv", key), said)


def _check_reach(recipe: Recipe, geometry: Geometry, partial: PartialKv) -> None:
    """Check that some layer sees the whole context, and that others find all that they see in the partial KV cache.

    Raises `RecipeError`, naming the key.
    """
    window, blocks = geometry.widest_window, partial.n_retrieval_blocks
    if geometry.layer_windows and all(geometry.layer_windows):
        raise recipe.error(
            ("partial_kv", "enabled"),
            f"is true, but no layer of the target sees more than the last {window} tokens, so that there is nothing to "
            "retrieve for it: leave partial_kv out",
        )
    least = partial.least_budget(window)
    if blocks < least:
        fits = partial.model_copy(update={"n_retrieval_blocks": least}).largest <= geometry.capacity
        advice = f"raise it to {least} or more, or partial_kv.n_window_blocks by {least - blocks}"
        raise recipe.error(
            ("partial_kv", "n_retrieval_blocks"),
            f"is {blocks}, but layers of the target see the last {window} tokens, more than these blocks and "
            f"partial_kv.n_window_blocks, {partial.n_window_blocks}, of {partial.block_size} tokens have; "
            + (advice if fits else "that leaves little of the context to save: leave partial_kv out"),
        )
    if isinstance(partial.budget, int) and partial.budget < least:
        raise recipe.error(
            ("partial_kv", "budget"),
            f"is {partial.budget}, but layers of the target see the last {window} tokens, which {least} blocks and the "
            f"window reach; raise it to {least} or more",
        )
