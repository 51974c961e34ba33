"""A tiny target on disk with a handful of source files, for the drafters' trainings."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer

from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.rope import RopeScaling
from outrider.tools.lab.reference.corpus import SourceFile, read_standard_library
from outrider.tools.lab.reference.data import train_tokenizer
from outrider.tools.lab.reference.export import write_decoder, write_json, write_lists
from outrider.tools.lab.reference.loop import Run

NAMES = (
    "bisect.py", "heapq.py", "keyword.py", "linecache.py", "netrc.py", "queue.py", "sched.py", "shlex.py",
)  # fmt: skip


def tiny_target(vocab: int, seed: int = 0) -> Decoder:
    """Eight layers, for three distinct taps; weights large enough that its choices vary."""
    config = DecoderConfig(
        family="qwen3", vocab_size=vocab, hidden_size=16, intermediate_size=24, num_layers=8, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1000.0, rope_scaling=RopeScaling(),
        max_positions=2048, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm="head", tie_embeddings=True,
        eos_token_ids=(0,),
    )  # fmt: skip
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
    return model.requires_grad_(False).eval()


@cache
def source_files() -> list[SourceFile]:
    """Training files and two held-out ones of the standard library."""
    files = read_standard_library()
    held_out = [file for file in files if file.held_out and 2000 < len(file.text) < 20_000][:2]
    return [file for file in files if file.name in NAMES and not file.held_out] + held_out


def write_target(out: Path, files: list[SourceFile]) -> None:
    """`out/target` with a tokenizer of the files' text, and the lists beside it."""
    target = out / "target"
    target.mkdir(parents=True)
    tokenizer: Tokenizer = train_tokenizer(file.text for file in files[:3])
    tokenizer.save(str(target / "tokenizer.json"))
    write_json(target / "tokenizer_config.json", {})
    write_decoder(tiny_target(tokenizer.get_vocab_size()), target)
    write_lists(files, out)


def tiny_run(folder: Path, minutes: float) -> Run:
    return Run(minutes, folder / "work", folder / "out", save_minutes=10, device="cpu", device_name="1 CPU")
