"""Training text of drafters: windows of the target's, and text that the target wrote itself, kept in its folder."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.tools.lab.reference.teacher import Teacher, generate

GENERATED_SHARE = 0.5
"""Of a drafter's windows."""
TEMPERATURES = (0.0, 0.7, 1.0)
PROMPT_LENGTHS = (16, 32, 64, 128, 256)
WINDOW = 512
ROWS = {"cpu": 128, "cuda": 2048}
"""Sequences that are generated at once: on a GPU launches decide how long a step of few takes."""


class WindowSource(Protocol):
    """`data.Windows`, as far as drafters use it."""

    rng: random.Random

    def batch(self, batch: int, length: int) -> NDArray[np.int64]: ...


class GeneratedText:
    """Rows of `window` tokens: a prompt cut from training text, and how the target continues.

    Kept as uint16 in `folder/generated.bin`. What another target wrote is thrown away. `seconds` is the time that
    generating has taken so far, over all runs.
    """

    def __init__(self, folder: Path, teacher: Teacher, window: int = WINDOW) -> None:
        self._file, self._notes = folder / "generated.bin", folder / "generated.json"
        self._model = copy.deepcopy(teacher.model).bfloat16()  # as it is stored; four times faster than f32 on a CPU
        self._window = window
        self._about = {"target": teacher.sha256, "window": window}
        notes = json.loads(self._notes.read_text(encoding="utf-8")) if self._notes.exists() else {}
        self.seconds = 0.0
        if {key: notes.get(key) for key in self._about} == self._about:
            self.seconds = float(notes["seconds"])
        elif self._file.exists():
            print(f"{self._file} was written by another target: generating it anew", flush=True)
            self._file.unlink()
        self.rows = self._read()

    def grow(self, seconds: float, prompts: WindowSource, rows: int) -> None:
        """Generate, `rows` rows at a time, until it has taken `seconds` in all (and at least once)."""
        while not len(self.rows) or self.seconds < seconds:
            started = time.perf_counter()
            new = self._generate(prompts, rows)
            with self._file.open("ab") as file:
                file.write(new.tobytes())
            self.rows = np.concatenate((self.rows, new))
            self.seconds += time.perf_counter() - started
            self._notes.write_text(json.dumps(self._about | {"seconds": self.seconds}) + "\n", encoding="utf-8")
            print(f"generated {self.rows.size} tokens in {self.seconds / 60:.1f} min", flush=True)

    def _generate(self, prompts: WindowSource, rows: int) -> NDArray[np.uint16]:
        device, choose = self._model.embedding.device, prompts.rng
        length = choose.choice([size for size in PROMPT_LENGTHS if size < self._window] or [1])
        start = choose.randrange(self._window - length)
        opening = prompts.batch(rows, self._window - 1)[:, start : start + length]
        temperatures = torch.tensor([TEMPERATURES[row % len(TEMPERATURES)] for row in range(rows)], device=device)
        rng = torch.Generator(device).manual_seed(len(self.rows))
        ids = torch.from_numpy(np.ascontiguousarray(opening)).to(device)
        written = generate(self._model, ids, temperatures, self._window - length, rng)
        return written.cpu().numpy().astype(np.uint16)

    def _read(self) -> NDArray[np.uint16]:
        """The whole rows of the file; a last one that was cut off is removed from it."""
        if not self._file.exists():
            return np.zeros((0, self._window), np.uint16)
        flat = np.fromfile(self._file, np.uint16)
        rows = flat[: len(flat) // self._window * self._window].reshape(-1, self._window)
        if rows.nbytes != self._file.stat().st_size:
            rows.tofile(self._file)
        return rows


class DrafterText:
    """Batches `[batch, length + 1]` of int64 tokens, GENERATED_SHARE of the rows generated, the rest from `windows`."""

    def __init__(self, windows: WindowSource, generated: NDArray[np.uint16], seed: int) -> None:
        self._windows, self._stream, self._row = windows, generated.reshape(-1), generated.shape[1]
        self._rng = random.Random(seed)

    def reseed(self, seed: int) -> None:
        self._rng, self._windows.rng = random.Random(seed), random.Random(seed)

    def batch(self, batch: int, length: int) -> NDArray[np.int64]:
        written = sum(self._rng.random() < GENERATED_SHARE for _ in range(batch))
        rows = [self._generated(length + 1) for _ in range(written)]
        if written < batch:
            rows.extend(self._windows.batch(batch - written, length))
        return np.stack(rows)

    def _generated(self, length: int) -> NDArray[np.int64]:
        """`length` tokens from the start of a row on; a longer window runs on into the rows after it."""
        start = self._rng.randrange(len(self._stream) // self._row) * self._row
        tokens: NDArray[np.int64] = self._stream[(start + np.arange(length)) % len(self._stream)].astype(np.int64)
        return tokens


def frequent_tokens(streams: list[NDArray[np.uint16]], size: int, vocab: int) -> torch.Tensor:
    """The `size` most frequent tokens, each stream counting alike, as ascending int64 ids."""
    share = sum(np.bincount(stream.reshape(-1), minlength=vocab) / max(1, stream.size) for stream in streams)
    return torch.from_numpy(np.sort(np.argsort(-np.asarray(share), kind="stable")[:size]).astype(np.int64))
