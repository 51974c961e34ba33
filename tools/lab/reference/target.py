"""Training of the reference target: a Qwen3-architecture decoder on source code, in windows that grow."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import CausalExecution
from outrider.compiler.models.rope import RopeScaling
from outrider.tools.lab.reference.corpus import SourceFile
from outrider.tools.lab.reference.data import Windows, load_corpus, token_byte_lengths, train_tokenizer
from outrider.tools.lab.reference.export import export_target
from outrider.tools.lab.reference.loop import Batch, Run, Schedule, Training, window_at

TARGET = DecoderConfig(
    family="qwen3",
    vocab_size=4096,
    hidden_size=320,
    intermediate_size=832,
    num_layers=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=100_000.0,  # slowest wavelength about 400k tokens: 8k windows turn it little, YaRN has room to 32k
    rope_scaling=RopeScaling(),
    max_positions=8192,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm="head",
    tie_embeddings=True,
    eos_token_ids=(0, 2),
)
STEP_TOKENS = 8192
WINDOWS: Schedule = ((0.0, 256), (0.45, 512), (0.75, 1024), (0.86, 2048), (0.93, 4096), (0.97, 8192))
CHECKPOINT = "checkpoint.pt"


def train_target(run: Run, files: list[SourceFile]) -> None:
    """Train, measure, and write `run.out/target` with the lists beside it."""
    run.work.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(_tokenizer(run.work, files), files)
    byte_lengths = token_byte_lengths(corpus.tokenizer)
    torch.manual_seed(0)
    model = Decoder(TARGET)
    initialise(model)
    model.to(run.device)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(corpus.train_code)} tokens of code"
    )
    training = Training(model, matrices(model), run.work / CHECKPOINT)
    windows = Windows(corpus.train_code, corpus.tasks, seed=0)
    if training.resume(run.device):
        windows.rng = random.Random(training.step)

    def take(progress: float) -> Batch:
        length = window_at(WINDOWS, progress)
        loss = loss_of(model, windows.batch(STEP_TOKENS // length, length), run.device)
        return Batch(loss, STEP_TOKENS, f"window {length}")

    def saved() -> None:
        bits = bits_per_byte(model, corpus.held_out_code, byte_lengths, 512, 16, run.device)
        print(f"step {training.step} held-out bits per byte (sample) {bits:.4f}", flush=True)

    training.run(run, take, saved)
    report = training.report(run.device_name)
    for length in (512, 2048, 8192):
        count = max(4, min(64, len(corpus.held_out_code) // length))
        bits = bits_per_byte(model, corpus.held_out_code, byte_lengths, length, count, run.device)
        report[f"held-out bits per byte, windows of {length} tokens"] = f"{bits:.4f}"
    export_target(model, corpus.tokenizer, corpus.files, report, run.out)


def _tokenizer(folder: Path, files: list[SourceFile]) -> Tokenizer:
    """The tokenizer kept in `folder`, trained there once."""
    path = folder / "tokenizer.json"
    if not path.exists():
        print("training the tokenizer ...", flush=True)
        train_tokenizer(f.text for f in files if not f.held_out).save(str(path))
    return Tokenizer.from_file(str(path))


def initialise(model: Decoder) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
            if name.endswith(("o.weight", "down.weight")):
                parameter.data.zero_()  # each block starts as the identity


def matrices(model: Decoder) -> list[torch.nn.Parameter]:
    return [p for p in model.layers.parameters() if p.ndim == 2]


def loss_of(model: Decoder, windows: NDArray[np.int64], device: str) -> torch.Tensor:
    ids = torch.from_numpy(windows).to(device)
    batch, length = ids.shape[0], ids.shape[1] - 1
    with torch.autocast(device, torch.bfloat16):
        logits = model(ids[:, :-1].reshape(-1), CausalExecution(model.config, batch, length, device))
    return F.cross_entropy(logits.float(), ids[:, 1:].reshape(-1))


@torch.no_grad()
def bits_per_byte(
    model: Decoder, code: NDArray[np.uint16], byte_lengths: NDArray[np.int64], length: int, windows: int, device: str
) -> float:
    """Bits per UTF-8 byte of held-out code, predicted in windows of `length` tokens (f32)."""
    starts = np.linspace(0, len(code) - length - 1, windows).astype(int)
    nats, size = 0.0, 0
    execution = CausalExecution(model.config, 1, length, device)
    for start in starts:
        window = torch.from_numpy(code[start : start + length + 1].astype(np.int64)).to(device)
        nats += float(F.cross_entropy(model(window[:-1], execution).float(), window[1:], reduction="sum"))
        size += int(byte_lengths[code[start + 1 : start + length + 1]].sum())
    return nats / math.log(2) / size
