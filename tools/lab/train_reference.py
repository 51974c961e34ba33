"""Train the reference models: `python -m outrider.tools.lab.train_reference [target|eagle3|dspark|model|all]`.

`target` (the default): a Qwen3-architecture decoder on the Python standard library's own source, by Muon (matrices)
and AdamW (the rest), with a warm-up, a constant stretch and a linear decay; windows grow from 256 to 8192 tokens.
`eagle3`, `dspark` and `model`: its drafters, an EAGLE3 head, a DSpark head and a small decoder, against the target in
`--out`, on training text and on text that the target writes first, for an eighth of the minutes. Heads are rounded to
`--bits` as they are written (`tools.lab.reference.pack` rounds one that was written with 16). `all`: target,
eagle3 and model, one after another.

Progress is the share of `--minutes` of training time used, so that a GPU and two CPU cores run the same
schedule; a run that is stopped resumes from its checkpoint. CPU: start it with
`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184`, which makes it 1.25x faster (no page faults per step).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar, get_args

import torch

from outrider.commands.arguments import Parser, at_least_0, at_least_1, number
from outrider.commands.console import guarded
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import MarkovKind
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.quantization import BITS
from outrider.compiler.opening import read_config
from outrider.tools.lab.reference.compressed import FLOAT, USUAL
from outrider.tools.lab.reference.corpus import read_standard_library
from outrider.tools.lab.reference.draft_model import ModelGeometry, train_model
from outrider.tools.lab.reference.drafter import prepare
from outrider.tools.lab.reference.dspark import BlockGeometry, train_dspark
from outrider.tools.lab.reference.eagle3 import UNROLLED, HeadGeometry, train_eagle3
from outrider.tools.lab.reference.export import check_size, write_lists
from outrider.tools.lab.reference.loop import Run
from outrider.tools.lab.reference.target import train_target

TARGET, HEAD, BLOCK, MODEL, ALL = PARTS = ("target", "eagle3", "dspark", "model", "all")
MINUTES = {TARGET: 100.0, HEAD: 60.0, BLOCK: 60.0, MODEL: 60.0, ALL: 220.0}
SHARES = {TARGET: 0.6, HEAD: 0.25, MODEL: 0.15}
"""Of the minutes of `all`."""
SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_dim")
OF_BLOCKS = ("markov", "markov_rank", "block_size", "taps")
OF_HEADS = ("hidden", "draft_vocab", "unroll", "fc_norm", "norm_output")
"""Options that a DSpark head has alone, and those that it has not."""

GEOMETRIES: dict[str, type[HeadGeometry | BlockGeometry | ModelGeometry]] = {
    HEAD: HeadGeometry,
    BLOCK: BlockGeometry,
    MODEL: ModelGeometry,
}

Geometry = TypeVar("Geometry", bound=HeadGeometry | BlockGeometry | ModelGeometry)


def train(arguments: argparse.Namespace) -> None:
    """Train what the arguments name, with what they say of it."""
    part = arguments.part
    minutes = MINUTES[part] if arguments.minutes is None else arguments.minutes
    shares = SHARES if part == ALL else {part: 1.0}
    run = Run(minutes, arguments.work, arguments.out, arguments.save_minutes, arguments.device, arguments.device_name)
    runs = {name: replace(run, minutes=minutes * share) for name, share in shares.items()}
    files = read_standard_library(arguments.library)
    if TARGET in runs:
        train_target(runs.pop(TARGET), files)
    if not runs:
        return
    geometries = {part: _geometry(GEOMETRIES[part], arguments) for part in runs}
    names, bits = {part: arguments.name or part for part in runs}, int(arguments.bits or USUAL)
    if (run.out / TARGET).exists():  # else `prepare` refuses
        target = read_config(run.out / TARGET)
        for part, name in names.items():  # what does not fit is refused before the target writes text
            check_size(_without_weights(geometries[part], target), run.out / name, FLOAT if part == MODEL else bits)
    drafting = replace(run, minutes=sum(r.minutes for r in runs.values()))
    lessons = prepare(drafting, files, arguments.step_tokens)
    if HEAD in runs:
        head, steps = _geometry(HeadGeometry, arguments), arguments.unroll or UNROLLED
        train_eagle3(runs[HEAD], lessons, head, names[HEAD], steps, arguments.start, bits)
    if BLOCK in runs:
        train_dspark(runs[BLOCK], lessons, _geometry(BlockGeometry, arguments), names[BLOCK], arguments.start, bits)
    if MODEL in runs:
        train_model(runs[MODEL], lessons, _geometry(ModelGeometry, arguments), names[MODEL])


def _geometry(kind: type[Geometry], arguments: argparse.Namespace) -> Geometry:
    """The sizes given, and the defaults of the rest."""
    given = {field.name: getattr(arguments, field.name) for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _without_weights(
    geometry: HeadGeometry | BlockGeometry | ModelGeometry, target: DecoderConfig
) -> Eagle3Head | BlockHead | Decoder:
    with torch.device("meta"):
        if isinstance(geometry, HeadGeometry):
            return Eagle3Head(geometry.config(target))
        if isinstance(geometry, BlockGeometry):
            return BlockHead(geometry.config(target, mask_token_id=0))
        return Decoder(geometry.config(target))


def _given(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Those of the options that the command line has, as it spells them."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.train_reference",
        description=__doc__,
        epilog="example: %(prog)s eagle3 --minutes 60",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=PARTS, default=TARGET, help="what to train (default: the target)")
    minutes = "training time in all (default 100; 60 for a drafter, 220 for all)"
    parser.add_argument("--minutes", type=number(above=0), help=minutes)
    parser.add_argument("--work", type=Path, default=Path("build/reference-training"), help="checkpoint folder")
    parser.add_argument("--out", type=Path, default=Path("plans/reference"), help="where the models are written")
    parser.add_argument("--save-minutes", type=number(above=0), default=10, help="minutes between checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--library", type=Path, help="standard library to read, such as /usr/lib/python3.11 (default: this Python's)"
    )
    parser.add_argument(
        "--lists-only",
        action="store_true",
        help="write corpus.txt.gz, held_out.jsonl.gz and calibration.jsonl.gz into --out, and train nothing",
    )
    drafter = parser.add_argument_group("drafters")
    drafter.add_argument("--name", help="folder in --out and checkpoint in --work (default: the part)")
    drafter.add_argument(
        "--step-tokens", type=at_least_1, help="tokens of a step (default 4096 on a CPU, 32768 on a GPU)"
    )
    for size in SIZES:
        default, of_block = getattr(HeadGeometry, size), getattr(BlockGeometry, size, None)
        other = f"; {BLOCK}: {of_block or 'as the target'}" if of_block != default else ""
        drafter.add_argument(
            f"--{size.replace('_', '-')}", type=at_least_1, metavar="N", help=f"default {default}{other}"
        )
    layers = f"of {MODEL} (default {ModelGeometry.layers}) and {BLOCK} (default {BlockGeometry.layers})"
    drafter.add_argument("--layers", type=at_least_1, metavar="N", help=layers)
    start = f"continue from this trained head; the draft vocabulary of {HEAD} may be another"
    drafter.add_argument("--start", type=Path, metavar="FOLDER", help=start)
    bits = f"bits of a head's projections in its checkpoint, {FLOAT}: floats (default {USUAL})"
    drafter.add_argument("--bits", choices=[str(each) for each in (*BITS, FLOAT)], help=bits)
    eagle3 = parser.add_argument_group(HEAD)
    eagle3.add_argument("--draft-vocab", type=at_least_1, metavar="N", help="tokens of the head (default 1536)")
    unroll = f"steps of the head in training (default {UNROLLED})"
    eagle3.add_argument("--unroll", type=at_least_1, metavar="N", help=unroll)
    switch = argparse.BooleanOptionalAction
    eagle3.add_argument("--fc-norm", action=switch, help="the head norms each feature stream (default: yes)")
    eagle3.add_argument(
        "--norm-output", action=switch, help="the head feeds back its normed hidden state (default: no)"
    )
    dspark = parser.add_argument_group(BLOCK)
    kind = f"Markov bias by the token before, gated by its slot, or recurrent (default {BlockGeometry.markov})"
    dspark.add_argument("--markov", choices=get_args(MarkovKind), help=kind)
    rank = f"of the Markov bias (default {BlockGeometry.markov_rank})"
    dspark.add_argument("--markov-rank", type=at_least_1, metavar="N", help=rank)
    size = f"tokens drafted by a block (default {BlockGeometry.block_size})"
    dspark.add_argument("--block-size", type=at_least_1, metavar="N", help=size)
    taps = "layers of the target whose incoming streams the head reads, ascending (default: EAGLE3's three)"
    dspark.add_argument("--taps", type=at_least_0, nargs="+", metavar="LAYER", help=taps)
    return parser


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(given))


def _run(given: list[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(given)
    if arguments.lists_only:
        write_lists(read_standard_library(arguments.library), arguments.out)
        return 0
    if arguments.name and arguments.part not in (HEAD, BLOCK, MODEL):
        parser.error(f"--name goes with {HEAD}, {BLOCK} or {MODEL}: the other parts write to fixed places")
    of_drafters = _given(arguments, *SIZES, "draft_vocab", "layers", "step_tokens", "bits", *OF_BLOCKS)
    if of_drafters and arguments.part == TARGET:
        parser.error(f"{of_drafters[0]} is a drafter's: name the part ({HEAD}, {BLOCK}, {MODEL} or {ALL})")
    if arguments.bits is not None and arguments.part == MODEL:
        parser.error(f"--bits goes with {HEAD} and {BLOCK}: a draft model is written in floats")
    of_blocks, of_heads = _given(arguments, *OF_BLOCKS), _given(arguments, *OF_HEADS)
    if of_blocks and arguments.part != BLOCK:
        parser.error(f"{of_blocks[0]} goes with {BLOCK} alone")
    if of_heads and arguments.part == BLOCK:
        parser.error(f"{of_heads[0]} does not go with {BLOCK}: its heads have the target's width and vocabulary")
    if arguments.taps is not None:
        arguments.taps = tuple(arguments.taps)
    arguments.device_name = (
        torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
