"""Whether a manifest with partial KV agrees with itself: its settings, and which KV cache each program runs over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from outrider.plans import names
from outrider.plans.manifest import Manifest, Program, Stage, longest_draft
from outrider.plans.partial_kv import PartialKv, Reduce

_REFRESH = ["BlockSummary", "BlockSelect", "PartialKvGather"]
_OF_TARGET = (names.KV, names.QUERIES, names.KEPT_INDICES, names.KEPT_COUNT)


def partial_problems(partial: PartialKv, manifest: Manifest) -> Iterator[str]:
    """Yield faults of the settings, beside the rest of the plan."""
    target, step = manifest.target, 2 + longest_draft(manifest.drafters)
    if not step <= partial.n_spec_tokens_buf <= target.prefill_chunk:
        yield (
            f"a buffer of {partial.n_spec_tokens_buf} tokens does not lie between a step of {step} and a chunk of "
            f"{target.prefill_chunk}"
        )
    least = partial.least_budget(target.widest_window)
    for blocks in (partial.n_retrieval_blocks, partial.budget):
        if isinstance(blocks, int) and blocks < least:
            yield f"{blocks} blocks do not reach the {target.widest_window} tokens that layers see: {least} do"
    if isinstance(partial.budget, int) and partial.budget > partial.n_retrieval_blocks:
        yield f"{partial.budget} blocks are more than there is room for, {partial.n_retrieval_blocks}"
    if partial.largest > target.capacity:
        yield f"{partial.largest} tokens are more than the full KV cache has, {target.capacity}"


def refresh_problems(program: Program, partial: PartialKv) -> Iterator[str]:
    """The program `refresh` copies KV that is there, as the settings say."""
    if [stage.run for stage in program.stages] != _REFRESH or program.results is not None:
        yield f"must be {', '.join(_REFRESH)}, without results"
        return
    layout = {
        "block_size": partial.block_size,
        "sink_blocks": partial.n_sink_blocks,
        "window_blocks": partial.n_window_blocks,
    }
    choice = {"reduction": get_args(Reduce).index(partial.reduction), "most_queries": partial.most_queries}
    others: tuple[Mapping[str, int], ...] = ({}, choice, {})
    for stage, more in zip(program.stages, others, strict=True):
        if stage.model != names.TARGET or stage.attributes != {**layout, **more}:
            yield f"{stage.run} has other attributes than partial_kv says"
        for parameter, buffer in (stage.inputs | stage.outputs).items():
            owner = names.TARGET if parameter in _OF_TARGET else names.PARTIAL
            if buffer != names.buffer_name(owner, names.KV if parameter == "partial_kv" else parameter):
                yield f"{stage.run} binds {parameter!r} to {buffer!r}"


def kv_problems(stage: Stage, program: str, small: bool) -> Iterator[str]:
    """A program runs over the KV cache that its name says: the `small` one, or that of the stage's model."""
    own = names.PARTIAL if small and stage.model == names.TARGET else stage.model
    for parameter, buffer in (stage.inputs | stage.outputs).items():
        model, tensor = _owner(buffer)
        of_cache = tensor in (names.KV, names.BIM) or tensor.startswith(("k_cache.", "v_cache."))
        if of_cache and model != own and program != names.REFRESH:
            yield f"{parameter!r} is bound to {buffer!r}, and the program runs over the KV cache of {own!r}"


def _owner(buffer: str) -> tuple[str, str]:
    """Model and tensor of a buffer, or of a layer's plane, such as `target.k_cache.0`; models may have dots."""
    model, _, tensor = buffer.rpartition(".")
    if tensor.isdigit():
        model, _, kind = model.rpartition(".")
        tensor = f"{kind}.{tensor}"
    return model, tensor
