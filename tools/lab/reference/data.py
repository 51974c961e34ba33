"""Windows of tokens to train on: source code in shuffled epochs, with outline and retrieval tasks mixed in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from outrider.tools.lab.reference.corpus import SourceFile
from outrider.tools.lab.reference.tasks import identifiers, outline_examples, retrieval_example

END_OF_TEXT, SPECIAL_TOKENS = "<|endoftext|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 4096
OUTLINE_SHARE, RETRIEVAL_SHARE = 0.12, 0.08
# Words with their leading space, short numbers, punctuation runs, newlines, indentation.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE: any bytes can be encoded, and no token is unknown."""
    from tokenizers import Regex

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """UTF-8 bytes of each token's text, by id; special tokens count 0."""
    lengths = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for token, index in tokenizer.get_vocab().items():
        if token not in SPECIAL_TOKENS:
            lengths[index] = len(token)  # the byte-level alphabet spells one character per byte
    return lengths


def code_stream(tokenizer: Tokenizer, files: list[SourceFile]) -> NDArray[np.uint16]:
    """All files one after another, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([file.text for file in files])
    return np.concatenate([np.array([*e.ids, end], np.uint16) for e in encoded])


class TaskStream:
    """An endless stream of outline and retrieval examples."""

    def __init__(self, tokenizer: Tokenizer, files: list[SourceFile]) -> None:
        self._tokenizer, self._files = tokenizer, files
        end = tokenizer.token_to_id(END_OF_TEXT)
        assert end is not None, "the tokenizer was trained with it"
        self._end = end
        texts = [t for f in files for t in outline_examples(f, lambda s: len(tokenizer.encode(s).ids))]
        self.outlines = [[*e.ids, self._end] for e in tokenizer.encode_batch(texts)]
        self._names = identifiers(files)

    def outline(self, length: int, rng: random.Random) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            ids += rng.choice(self.outlines)
        return ids[:length]

    def retrieval(self, length: int, rng: random.Random) -> list[int]:
        """One example that fills the window: a stretch of a file (or several) and its questions."""
        text = ""
        wanted = int(length * 3.4)
        while len(text) < wanted:
            file = rng.choice(self._files)
            start = rng.randrange(max(1, len(file.text) - wanted))
            text += file.text[file.text.find("\n", start) + 1 :]
        share = 0.95
        while share * wanted >= 1:
            example = retrieval_example(text[: int(wanted * share)], self._names, rng)
            ids = self._tokenizer.encode(example).ids
            if len(ids) <= length:
                return ids + [self._end] * (length - len(ids))
            share *= min(0.97, length / len(ids))
        return self.outline(length, rng)  # too short for a question


class Windows:
    """Batches `[batch, length + 1]` of int64 tokens; inputs are all but the last, labels all but the first."""

    def __init__(self, code: NDArray[np.uint16], tasks: TaskStream, seed: int) -> None:
        self._code, self._tasks = code, tasks
        self.rng = random.Random(seed)
        self._starts: list[int] = []
        self._length = 0

    def batch(self, batch: int, length: int) -> NDArray[np.int64]:
        return np.stack([self._window(length + 1) for _ in range(batch)])

    def _window(self, length: int) -> NDArray[np.int64]:
        kind = self.rng.random()
        if kind < OUTLINE_SHARE:
            return np.array(self._tasks.outline(length, self.rng), np.int64)
        if kind < OUTLINE_SHARE + RETRIEVAL_SHARE:
            return np.array(self._tasks.retrieval(length, self.rng), np.int64)
        if not self._starts or self._length != length:
            self._length = length
            self._starts = list(range(self.rng.randrange(length), len(self._code) - length, length))
            self.rng.shuffle(self._starts)
        start = self._starts.pop()
        return self._code[start : start + length].astype(np.int64)


@dataclass
class Corpus:
    """The source files as tokens, the held-out ones apart."""

    tokenizer: Tokenizer
    files: list[SourceFile]
    train_code: NDArray[np.uint16]
    held_out_code: NDArray[np.uint16]
    tasks: TaskStream


def load_corpus(tokenizer: Tokenizer, files: list[SourceFile]) -> Corpus:
    print(f"tokenizing {len(files)} files ...", flush=True)
    train = [f for f in files if not f.held_out]
    return Corpus(
        tokenizer,
        files,
        code_stream(tokenizer, train),
        code_stream(tokenizer, [f for f in files if f.held_out and not f.is_test]),
        TaskStream(tokenizer, train),
    )
