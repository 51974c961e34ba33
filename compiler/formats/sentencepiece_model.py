"""SentencePiece's `tokenizer.model`, as a `tokenizers` object, for checkpoints without a `tokenizer.json`.

The file is read here, without the sentencepiece package, and BPE gives SentencePiece's own tokens, but beside symbols
that users defined in a model that puts a space before a text (`make_tokenizer`). Unigram does where one way to part a
text is the best; of several the tokenizers library may take another, and it takes the text `<0x41>` for a byte. What
transformers makes of the file (5.23) differs more: it takes Unigram for BPE, and puts no space before a text for
Mistral.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from outrider.plans.errors import CheckpointError
from outrider.plans.protobuf import BYTES, FIXED32, VARINT, fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces, in `tokenizer.model` and in GGUF files alike."""
SPACE = "\u2581"
"""Stands for a space in pieces."""
_MOST_MERGED = 2**26
"""Characters of all merges together: 256 for each of 262,144 pieces."""
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

_Fields = dict[tuple[int, int], Any]
"""A message's fields, by their numbers and kinds: one of another kind than it should have is not found."""


@dataclass(frozen=True)
class Pieces:
    """A vocabulary: by ids, the pieces, their types, and their scores."""

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True)
class SentencePieceModel:
    """What a `tokenizer.model` says; ids are -1 for tokens that it has not."""

    pieces: Pieces
    kind: str
    byte_fallback: bool
    unknown: int
    bos: int
    eos: int
    characters: bytes
    """The normalizer's table, empty where characters stay as they are."""
    dummy_prefix: bool
    single_spaces: bool
    space_after: bool
    """Whether pieces have the space after a word, and not the one before it."""
    space_escaped: bool
    """Whether a space is the character `SPACE` in pieces."""


def read_model(file: Path) -> SentencePieceModel:
    """Read a `tokenizer.model`."""
    try:
        model = _model(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, struct.error):
        raise CheckpointError(
            f"{file} is no model of SentencePiece that can be read, and there is no tokenizer.json; add a "
            "tokenizer.json of the model, which transformers' `save_pretrained` writes"
        ) from None
    if model.kind not in ("bpe", "unigram"):
        raise CheckpointError(f"{file} is a SentencePiece model of the kind {model.kind}; BPE and Unigram are read")
    if model.space_after or not model.space_escaped:
        wrong = "treat_whitespace_as_suffix set" if model.space_after else "escape_whitespaces switched off"
        raise CheckpointError(f"{file} has {wrong}, which is not read; add a tokenizer.json of the model")
    return model


def make_tokenizer(
    model: SentencePieceModel, settings: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> Tokenizer:
    """Return the tokenizer of a model.

    `settings` are those of `tokenizer_config.json`, whose `add_bos_token`, `add_eos_token`, `add_prefix_space` and
    `legacy` count as in transformers' tokenizers of Llama and Gemma. Without `add_bos_token` a text begins with BOS, as
    in transformers 4 and as these models are trained; transformers 5.23 puts none. `added` are tokens by id, of the
    model's pieces or after them.

    Where a space is put before a text, symbols that users defined are found before that: a text that begins with one
    gets no space, text after one gets a space unless `legacy` is false, and no space of the text is part of one.
    """
    prefix = _flag(settings, "add_prefix_space", model.dummy_prefix)
    # Before the text alone, not after each special token; the library cannot do that where spaces are taken away.
    first = prefix and not model.single_spaces and not _flag(settings, "legacy", True)
    pieces = model.pieces
    if model.kind == "bpe":
        used = {token: number for number, token in enumerate(pieces.tokens) if pieces.types[number] != UNUSED}
        bpe = BPE(
            vocab={token: number for number, token in enumerate(pieces.tokens)},
            merges=merges(pieces, used),
            unk_token=pieces.tokens[model.unknown],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
        tokenizer = Tokenizer(bpe)
    else:
        scored = list(zip(pieces.tokens, map(float, pieces.scores), strict=True))
        tokenizer = Tokenizer(Unigram(scored, unk_id=model.unknown, byte_fallback=model.byte_fallback))
    steps: list[normalizers.Normalizer] = []
    if model.characters:
        steps.append(normalizers.Precompiled(model.characters))
    if model.single_spaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" +"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    if first:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = pieces_decoder(prefix)
    # A symbol with the sign of a space is found in the text as it is normalized. With a prefix none can be: the library
    # would put one before the symbol that it looks for, too.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=kind == USER_DEFINED and not prefix)
            for token, kind in zip(model.pieces.tokens, model.pieces.types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    for number, token in sorted(added.items()):
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointError(
                f"the added token {token.content!r} has the id {number}, and would get "
                f"{tokenizer.token_to_id(token.content)} after the pieces of tokenizer.model"
            )
    begin = end = None
    if model.bos >= 0 and _flag(settings, "add_bos_token", True):
        begin = model.pieces.tokens[model.bos], model.bos
    if model.eos >= 0 and _flag(settings, "add_eos_token", False):
        end = model.pieces.tokens[model.eos], model.eos
    surround(tokenizer, begin, end)
    return tokenizer


def pieces_decoder(prefix: bool) -> decoders.Decoder:
    """Return what makes a text of pieces; `prefix`: a space was put before it."""
    stripped = [decoders.Strip(" ", 1, 0)] if prefix else []
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])


def surround(tokenizer: Tokenizer, first: tuple[str, int] | None, last: tuple[str, int] | None) -> None:
    """Let a tokenizer put special tokens, each with its id, around a text."""
    known = [token for token in (first, last) if token is not None]
    if known:
        single = [*([first[0]] if first else []), "$A", *([last[0]] if last else [])]
        pair = [*single, *("$B:1" if part == "$A" else f"{part}:1" for part in single)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(dict.fromkeys(known))
        )


def merges(pieces: Pieces, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that scores stand for; `ids` are the tokens that texts may have.

    SentencePiece merges the neighbours whose union has the highest score. So every way in which a piece parts into two
    pieces is a merge, and pieces of higher scores come first; of one piece, the leftmost parting in the vocabulary's
    order, as transformers has it.
    """
    merged = [token for token, number in ids.items() if pieces.types[number] in (NORMAL, USER_DEFINED)]
    ranked = sorted(merged, key=lambda piece: -float(pieces.scores[ids[piece]]))
    lengths = sorted({len(token) for token in ids})
    found, size = [], 0
    for piece in ranked:
        partings = sorted(_partings(piece, ids, lengths))
        found += [(pieces.tokens[first], pieces.tokens[second]) for first, second in partings]
        size += len(piece) * len(partings)
        if size > _MOST_MERGED:
            raise CheckpointError(
                f"the pieces of the tokenizer part into each other in too many ways: merges of over {_MOST_MERGED} "
                "characters; add a tokenizer.json of the model, which lists its merges"
            )
    return found


def _partings(piece: str, ids: Mapping[str, int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ids of each two tokens that make `piece`. A damaged piece may be long: only `lengths` of tokens are
    tried, and no part is kept."""
    for length in lengths:
        if length >= len(piece):
            return
        first = ids.get(piece[:length])
        second = None if first is None else ids.get(piece[length:])
        if first is not None and second is not None:
            yield first, second


def _flag(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    value = settings.get(key)
    return value if isinstance(value, bool) else default


# The file: messages of Protocol Buffers, by the numbers of `sentencepiece_model.proto`.


def _model(data: bytes) -> SentencePieceModel:
    """Read the model's message. Raises ValueError, IndexError or struct.error for what is none."""
    tokens, types, scores = list[str](), list[int](), list[float]()
    trainer, normalizer = _Fields(), _Fields()
    for (number, kind), value in fields(data):
        if kind != BYTES:
            continue
        if number == 1:
            piece = _Fields(fields(value))
            if (1, BYTES) not in piece:
                raise ValueError("a piece without a text")
            tokens.append(piece[1, BYTES].decode())
            scores.append(struct.unpack("<f", piece.get((2, FIXED32), bytes(4)))[0])
            types.append(piece.get((3, VARINT), NORMAL))
        elif number == 2:
            trainer |= _Fields(fields(value))
        elif number == 3:
            normalizer |= _Fields(fields(value))
    if not tokens or len(set(tokens)) < len(tokens) or not set(types) <= set(range(NORMAL, BYTE + 1)):
        raise ValueError("no vocabulary")
    ids = (trainer.get((number, VARINT), role) for number, role in ((40, 0), (41, 1), (42, 2)))
    unknown, bos, eos = (value - 2**64 if value >= 2**63 else value for value in ids)  # negative: written with 64 bits
    if not (0 <= unknown < len(tokens) and bos < len(tokens) and eos < len(tokens)):
        raise ValueError("ids outside the vocabulary")
    kind = trainer.get((3, VARINT), 1)
    if kind not in _KINDS:
        raise ValueError("no such kind of model")
    return SentencePieceModel(
        Pieces(tokens, types, scores),
        kind=_KINDS[kind],
        byte_fallback=bool(trainer.get((35, VARINT), 0)),
        unknown=unknown,
        bos=bos,
        eos=eos,
        characters=normalizer.get((2, BYTES), b""),
        dummy_prefix=bool(normalizer.get((3, VARINT), 1)),
        single_spaces=bool(normalizer.get((4, VARINT), 1)),
        space_after=bool(trainer.get((24, VARINT), 0)),
        space_escaped=bool(normalizer.get((5, VARINT), 1)),
    )
