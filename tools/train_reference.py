"""Train the reference target: `python -m tools.train_reference --minutes 100`.

A Qwen3-architecture decoder on the Python standard library's own source, by Muon (matrices) and AdamW
(the rest), with a warm-up, a constant stretch and a linear decay. Windows grow from 256 to 8192 tokens.
Progress is the share of `--minutes` of training time used, so that a GPU and two CPU cores run the same
schedule; a run that is stopped resumes from its checkpoint. CPU: start it with
`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184`, which makes it 1.25x faster (no page faults per step).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compiler.models.config import DecoderConfig
from compiler.models.decoder import Decoder
from compiler.models.eager import CausalExecution
from compiler.models.rope import RopeScaling
from tools.reference.corpus import SourceFile, read_standard_library
from tools.reference.data import TaskStream, Windows, code_stream, token_byte_lengths, train_tokenizer
from tools.reference.export import export_target, write_lists

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
    qk_norm=True,
    tie_embeddings=True,
    eos_token_ids=(0, 2),
)
STEP_TOKENS = 8192
MUON_LR, ADAM_LR, WEIGHT_DECAY, WARMUP, DECAY_FROM = 4e-3, 3e-3, 0.05, 0.01, 0.6
WINDOWS = ((0.0, 256), (0.45, 512), (0.75, 1024), (0.86, 2048), (0.93, 4096), (0.97, 8192))


@dataclass
class Corpus:
    tokenizer: Tokenizer
    files: list[SourceFile]
    train_code: NDArray[np.uint16]
    held_out_code: NDArray[np.uint16]
    tasks: TaskStream


def load_corpus(folder: Path) -> Corpus:
    """Read, split and tokenize the standard library; the tokenizer is kept in `folder`."""
    files = read_standard_library()
    train = [f for f in files if not f.held_out]
    path = folder / "tokenizer.json"
    if not path.exists():
        print("training the tokenizer ...", flush=True)
        train_tokenizer(f.text for f in train).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    print(f"tokenizing {len(files)} files ...", flush=True)
    return Corpus(
        tokenizer,
        files,
        code_stream(tokenizer, train),
        code_stream(tokenizer, [f for f in files if f.held_out and not f.is_test]),
        TaskStream(tokenizer, train),
    )


def initialise(model: Decoder) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
            if name.endswith(("o.weight", "down.weight")):
                parameter.data.zero_()  # each block starts as the identity


def optimizers(model: Decoder) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)]


def rate(progress: float) -> float:
    """Share of the full learning rate: linear up over WARMUP, constant, linear down to 2 % from DECAY_FROM."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return 1.0 if progress < DECAY_FROM else max(0.02, (1 - progress) / (1 - DECAY_FROM))


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


def train(arguments: argparse.Namespace) -> None:
    device = arguments.device
    folder: Path = arguments.work
    folder.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(folder)
    byte_lengths = token_byte_lengths(corpus.tokenizer)
    torch.manual_seed(0)
    model = Decoder(TARGET)
    initialise(model)
    model.to(device)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(corpus.train_code)} tokens of code"
    )
    run = optimizers(model)
    windows = Windows(corpus.train_code, corpus.tasks, seed=0)
    step, used, tokens = 0, 0.0, 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(run, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, used, tokens = state["step"], state["used"], state["tokens"]
        windows.rng = random.Random(step)
        print(f"resumed at step {step}, {used / 60:.1f} minutes")

    def save() -> None:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in run]}
        torch.save(state | {"step": step, "used": used, "tokens": tokens}, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").rename(checkpoint)

    total = arguments.minutes * 60
    mean, last_save, last = 0.0, used, time.perf_counter()
    while used < total:
        progress = used / total
        length = [size for start, size in WINDOWS if progress >= start][-1]
        for optimizer, base in zip(run, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate(progress)
        loss = loss_of(model, windows.batch(STEP_TOKENS // length, length), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in run:
            optimizer.step()
            optimizer.zero_grad()
        value = float(loss)
        mean = value if not mean else 0.97 * mean + 0.03 * value
        now = time.perf_counter()
        used, last, step, tokens = used + now - last, now, step + 1, tokens + STEP_TOKENS
        if step % 20 == 0:
            print(
                f"step {step} {used / 60:.1f} min window {length} loss {mean:.3f} {tokens / used:.0f} tok/s", flush=True
            )
        if used - last_save > arguments.save_minutes * 60:
            save()
            bits = bits_per_byte(model, corpus.held_out_code, byte_lengths, 512, 16, device)
            print(f"step {step} held-out bits per byte (sample) {bits:.4f}", flush=True)
            last_save, last = used, time.perf_counter()
    save()
    report = {
        "minutes": f"{used / 60:.0f} on {arguments.device_name}",
        "steps": str(step),
        "tokens": f"{tokens:,}",
    }
    for length in (512, 2048, 8192):
        count = max(4, min(64, len(corpus.held_out_code) // length))
        bits = bits_per_byte(model, corpus.held_out_code, byte_lengths, length, count, device)
        report[f"held-out bits per byte, windows of {length} tokens"] = f"{bits:.4f}"
    export_target(model, corpus.tokenizer, corpus.files, report, arguments.out)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=100, help="training time in all (default 100)")
    parser.add_argument("--work", type=Path, default=Path("build/reference-training"), help="checkpoint folder")
    parser.add_argument("--out", type=Path, default=Path("plans/reference"), help="where the target is written")
    parser.add_argument("--save-minutes", type=float, default=10, help="minutes between checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--lists-only", action="store_true", help="write corpus.txt and held_out.jsonl into --out, and train nothing"
    )
    arguments = parser.parse_args(given)
    if arguments.lists_only:
        write_lists(read_standard_library(), arguments.out)
        return
    arguments.device_name = (
        torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    train(arguments)


if __name__ == "__main__":
    main()
