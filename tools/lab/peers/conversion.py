"""A checkpoint in the formats of other engines; each is kept for the next time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.commands.console import stderr
from outrider.compiler.checkpoint import checkpoint_hashes
from outrider.compiler.identity import digest
from outrider.plans.errors import OutriderError
from outrider.tools.lab.peers.engine import GENAI, LLAMA_CPP, OPENVINO, Precision

_LLAMA_CPP_TYPES: dict[Precision, str] = {"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
_OPENVINO_TYPES = _LLAMA_CPP_TYPES | {"fp32": "F16"}  # it reads no F32; at load it makes float32 of F16
_MODEL = "model.gguf"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def convert(engine: str, checkpoint: Path, work: Path, precision: Precision, tokenizer_of: Path | None = None) -> Path:
    """Return a file or folder that `engine` reads; kept in `work` under the hash of the checkpoint's files.

    A draft model without a tokenizer gets that of the folder `tokenizer_of`: formats of engines want one.
    Raises `OutriderError` with the reason where the checkpoint cannot be converted.
    """
    kept = work / f"{engine}-{precision}-{digest(checkpoint_hashes(checkpoint))[:12]}"
    if not kept.exists():
        unfinished = work / f".{kept.name}.building"
        shutil.rmtree(unfinished, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        try:
            status = stderr.status(f"converting {checkpoint} for {engine}, {precision}")
            with status, _whole(checkpoint, tokenizer_of) as folder:
                _CONVERTERS[engine](folder, unfinished, precision)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        unfinished.rename(kept)
    return kept / _MODEL if engine == LLAMA_CPP else kept


@contextmanager
def _whole(checkpoint: Path, tokenizer_of: Path | None) -> Iterator[Path]:
    """The checkpoint, or a folder of links to its files and to the tokenizer's, where it has none."""
    if tokenizer_of is None or (checkpoint / _TOKENIZER[0]).exists():
        yield checkpoint
        return
    with TemporaryDirectory() as made:
        for file in checkpoint.iterdir():
            (Path(made) / file.name).symlink_to(file.resolve())
        for name in _TOKENIZER:
            (Path(made) / name).symlink_to((tokenizer_of / name).resolve())
        yield Path(made)


def _for_genai(checkpoint: Path, folder: Path, precision: Precision) -> None:
    """Blocks of 32 and accuracy level 4 are the builder's own choice for quantised weights on the CPU."""
    options = ["-i", str(checkpoint), "-o", str(folder), "-p", precision, "-e", "cpu"]
    _run("onnxruntime-genai's builder", checkpoint, ["-m", "onnxruntime_genai.models.builder", *options])


def _for_llama_cpp(checkpoint: Path, folder: Path, precision: Precision) -> None:
    _write_gguf(checkpoint, folder, _LLAMA_CPP_TYPES[precision])


def _for_openvino(checkpoint: Path, folder: Path, precision: Precision) -> None:
    """A draft model must be in OpenVINO's format, so that the target is in it too."""
    _write_gguf(checkpoint, folder, _OPENVINO_TYPES[precision])
    code = "import sys, openvino_genai as g; g.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
    _run("OpenVINO GenAI", checkpoint, ["-c", code, str(folder / _MODEL)])
    (folder / _MODEL).unlink()


_CONVERTERS: dict[str, Callable[[Path, Path, Precision], None]] = {
    GENAI: _for_genai,
    LLAMA_CPP: _for_llama_cpp,
    OPENVINO: _for_openvino,
}
CONVERTED = frozenset(_CONVERTERS)
"""Engines that read a format of their own."""


def _write_gguf(checkpoint: Path, folder: Path, kind: str) -> None:
    from outrider.tools.lab.peers.gguf_file import write_gguf  # imports gguf, which need not be installed

    folder.mkdir()
    write_gguf(checkpoint, folder / _MODEL, kind)


def _run(who: str, checkpoint: Path, arguments: Sequence[str]) -> None:
    """Run Python in a process of its own: what it imports and prints stays there."""
    ended = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, errors="replace")
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or ["it said nothing"]
        raise OutriderError(f"{who} cannot convert {checkpoint} ({said[-1].strip()})")
