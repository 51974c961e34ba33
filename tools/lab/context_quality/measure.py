"""From the command's options to its report: what is read, at which lengths, with which rope scaling."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.compiler.checkpoint import checkpoint_hashes, load_decoder
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import check_capacity, load_recipe
from outrider.plans.errors import CheckpointError, RequestError
from outrider.plans.machine import peak_rss_bytes
from outrider.tools.identity import git_sha
from outrider.tools.lab.context_quality.figures import RULES, Answers, best_shares, judge, loss_row, retrieval_row
from outrider.tools.lab.context_quality.held_out import Lines, documents, held_out_files
from outrider.tools.lab.context_quality.questions import Context, Contexts
from outrider.tools.lab.context_quality.reading import answers, short_losses, token_losses
from outrider.tools.lab.reference.tasks import identifiers
from outrider.tools.measuring import measuring

RECIPE, CHECKPOINT = "recipe", "checkpoint"
FIRST_LENGTH, SHORT_WINDOW = 1024, 1024
BEYOND = 2  # times the trained length: how far the checkpoint's own scaling is followed where the recipe replaces it
MOST_CONTEXTS = 8  # at a length, for each at the longest
_IN_AT_LEAST = 2  # held-out files: words that are names to ask for


@dataclass
class _Variant:
    """The model with one rope scaling, and what was read with it."""

    config: DecoderConfig
    lengths: list[int]
    losses: list[Tensor] = field(default_factory=list)
    answers: dict[int, list[Answers]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Material:
    """The texts to read: documents of the longest length, and contexts by their length."""

    documents: list[Tensor]
    contexts: dict[int, list[Context]]
    files: int


@dataclass(frozen=True)
class _Job:
    """Something to read. `cost` says how long it takes against the others."""

    doing: str
    cost: float
    run: Callable[[], None]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises `RequestError` for lengths that the recipe's context or the held-out text cannot serve."""
    started = perf_counter()
    recipe = load_recipe(options.recipe)
    checkpoint = recipe.checkpoint_path
    own, config = read_config(checkpoint), read_config(checkpoint, recipe.rope_scaling)
    check_capacity(recipe, config)
    lengths = _lengths(options.lengths, recipe.capacity.context)
    trained = config.rope_scaling.original_max_position_embeddings or own.max_positions
    variants = _variants(own, config, lengths, trained)
    material = _material(options, checkpoint, own, lengths)
    model = load_decoder(checkpoint, recipe.target.dtype)
    window = min(SHORT_WINDOW, lengths[0]) // 2 * 2
    short: list[Tensor] = []
    _work([*_document_jobs(model, own, window, short, material, variants), *_context_jobs(model, material, variants)])
    loss = {name: [loss_row(length, v.losses, short) for length in v.lengths] for name, v in variants.items()}
    retrieval = {
        name: [retrieval_row(length, v.answers[length]) for length in v.lengths] for name, v in variants.items()
    }
    best = best_shares([row for row in retrieval.get(CHECKPOINT, []) if row["length"] <= trained])
    return {
        "git_sha": git_sha(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": perf_counter() - started,
        "peak_rss_bytes": peak_rss_bytes(),
        "recipe": str(options.recipe),
        "checkpoint": str(recipe.target.checkpoint),
        "checkpoint_sha256": checkpoint_hashes(checkpoint),
        "dtype": recipe.target.dtype,
        "context": recipe.capacity.context,
        "trained_length": trained,
        "rope_scaling": {name: asdict(variant.config.rope_scaling) for name, variant in variants.items()},
        "held_out_files": material.files,
        "documents": options.documents,
        "short_window": window,
        "needles": options.needles,
        "loss": loss,
        "retrieval": retrieval,
        "best_within_training": best,
        "rules": RULES,
        "out_of_its_depth": {name: judge(loss[name], retrieval[name], best, options.needles) for name in variants},
    }


def _lengths(asked: Sequence[int] | None, context: int) -> list[int]:
    if asked is None:
        doubled = [FIRST_LENGTH << power for power in range(context.bit_length()) if FIRST_LENGTH << power < context]
        return [*doubled, context]
    for length in asked:
        if length > context:
            raise RequestError(f"--lengths has {length}; the recipe's context is {context}.")
    return sorted(set(asked))


def _variants(own: DecoderConfig, config: DecoderConfig, lengths: list[int], trained: int) -> dict[str, _Variant]:
    """The recipe's rope scaling first, then the checkpoint's own as far as it is of interest; or that alone."""
    if config == own:
        return {CHECKPOINT: _Variant(own, lengths)}
    near = [length for length in lengths if length <= BEYOND * trained]
    return {RECIPE: _Variant(config, lengths)} | ({CHECKPOINT: _Variant(own, near)} if near else {})


def _material(options: argparse.Namespace, checkpoint: Path, config: DecoderConfig, lengths: list[int]) -> _Material:
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; save it with `tokenizer.save_pretrained`")
    tokenizer = Tokenizer.from_file(str(path))
    files = held_out_files(checkpoint, options.library)
    longest = lengths[-1]
    texts = documents(tokenizer, files, config.eos_token_ids[:1], options.documents, longest)
    maker = Contexts(tokenizer, Lines(tokenizer, files), identifiers(files, _IN_AT_LEAST), options.needles)
    counts = {length: options.contexts * min(MOST_CONTEXTS, longest // length) for length in lengths}
    contexts = {length: [maker.make(length, seed) for seed in range(count)] for length, count in counts.items()}
    return _Material([torch.tensor(ids) for ids in texts], contexts, len(files))


def _document_jobs(
    model: Decoder,
    own: DecoderConfig,
    window: int,
    short: list[Tensor],
    material: _Material,
    variants: Mapping[str, _Variant],
) -> Iterator[_Job]:
    def read(variant: _Variant, ids: Tensor) -> None:
        variant.losses.append(token_losses(model, variant.config, ids[None])[0])

    def read_short(ids: Tensor) -> None:
        short.append(short_losses(model, own, ids, window))

    for document in material.documents:
        cost = 2 * len(document) / window * _cost(model, window)
        yield _Job(f"a document in windows of {window} tokens", cost, partial(read_short, document))
        for name, variant in variants.items():
            ids = document[: variant.lengths[-1]]
            doing = f"a document of {len(ids)} tokens, the {name}'s scaling"
            yield _Job(doing, _cost(model, len(ids)), partial(read, variant, ids))


def _context_jobs(model: Decoder, material: _Material, variants: Mapping[str, _Variant]) -> Iterator[_Job]:
    def ask(variant: _Variant, length: int, context: Context) -> None:
        given = answers(model, variant.config, context)
        variant.answers.setdefault(length, []).append(Answers(context, given))

    for name, variant in variants.items():
        for length in variant.lengths:
            for context in material.contexts[length]:
                doing = f"questions after {length} tokens, the {name}'s scaling"
                yield _Job(doing, _cost(model, length), partial(ask, variant, length, context))


def _cost(model: Decoder, length: int) -> float:
    """Multiplications of a pass over `length` tokens."""
    c = model.config
    return length * (sum(p.numel() for p in model.parameters()) + length * c.query_size * c.num_layers)


def _work(jobs: Sequence[_Job]) -> None:
    with measuring([job.cost for job in jobs], "reading") as begin:
        for job in jobs:
            begin(job.doing)
            job.run()
