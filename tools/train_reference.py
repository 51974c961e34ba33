"""Train the reference models: `python -m tools.train_reference [target|eagle3|model|all] --minutes 100`.

`target` (the default): a Qwen3-architecture decoder on the Python standard library's own source, by Muon (matrices)
and AdamW (the rest), with a warm-up, a constant stretch and a linear decay; windows grow from 256 to 8192 tokens.
`eagle3` and `model`: its two drafters, an EAGLE3 head and a small decoder, against the target in `--out`, on training
text and on text that the target writes first, for a quarter of the minutes. `all`: the three, one after another.

Progress is the share of `--minutes` of training time used, so that a GPU and two CPU cores run the same
schedule; a run that is stopped resumes from its checkpoint. CPU: start it with
`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184`, which makes it 1.25x faster (no page faults per step).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import torch

from commands.arguments import Parser, at_least_1, number
from commands.console import guarded
from tools.reference.corpus import read_standard_library
from tools.reference.draft_model import ModelGeometry, train_model
from tools.reference.drafter import prepare
from tools.reference.eagle3 import HeadGeometry, train_eagle3
from tools.reference.export import write_lists
from tools.reference.loop import Run
from tools.reference.target import train_target

TARGET, HEAD, MODEL, ALL = PARTS = ("target", "eagle3", "model", "all")
MINUTES = {TARGET: 100.0, HEAD: 60.0, MODEL: 60.0, ALL: 220.0}
SHARES = {TARGET: 0.6, HEAD: 0.25, MODEL: 0.15}
"""Of the minutes of `all`."""
SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_dim")

Geometry = TypeVar("Geometry", HeadGeometry, ModelGeometry)


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
    drafting = replace(run, minutes=sum(r.minutes for r in runs.values()))
    lessons = prepare(drafting, files, arguments.step_tokens)
    if HEAD in runs:
        name = arguments.name or HEAD
        train_eagle3(runs[HEAD], lessons, _geometry(HeadGeometry, arguments), name, arguments.unroll, arguments.start)
    if MODEL in runs:
        train_model(runs[MODEL], lessons, _geometry(ModelGeometry, arguments), arguments.name or MODEL)


def _geometry(kind: type[Geometry], arguments: argparse.Namespace) -> Geometry:
    """The sizes given, and the defaults of the rest."""
    given = {field.name: getattr(arguments, field.name) for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.train_reference",
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
        help="write corpus.txt, held_out.jsonl and calibration.jsonl into --out, and train nothing",
    )
    drafter = parser.add_argument_group("drafters")
    drafter.add_argument("--name", help="folder in --out and checkpoint in --work (default: the part)")
    drafter.add_argument(
        "--step-tokens", type=at_least_1, help="tokens of a step (default 4096 on a CPU, 32768 on a GPU)"
    )
    for size in SIZES:
        default = getattr(HeadGeometry, size)
        drafter.add_argument(f"--{size.replace('_', '-')}", type=at_least_1, metavar="N", help=f"default {default}")
    drafter.add_argument("--layers", type=at_least_1, metavar="N", help="of the draft model (default 1)")
    drafter.add_argument("--draft-vocab", type=at_least_1, metavar="N", help="tokens of the head (default 1536)")
    start = "go on from this trained head; its draft vocabulary may be another"
    drafter.add_argument("--start", type=Path, metavar="FOLDER", help=start)
    drafter.add_argument(
        "--unroll", type=at_least_1, default=5, metavar="N", help="steps of the head in training (default 5)"
    )
    switch = argparse.BooleanOptionalAction
    drafter.add_argument("--fc-norm", action=switch, help="the head norms each feature stream (default: yes)")
    drafter.add_argument(
        "--norm-output", action=switch, help="the head feeds back its normed hidden state (default: no)"
    )
    return parser


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(given))


def _run(given: list[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(given)
    if arguments.lists_only:
        write_lists(read_standard_library(arguments.library), arguments.out)
        return 0
    if arguments.name and arguments.part not in (HEAD, MODEL):
        parser.error(f"--name goes with {HEAD} or {MODEL}: the other parts write to fixed places")
    given_sizes = [o for o in (*SIZES, "draft_vocab", "layers", "step_tokens") if getattr(arguments, o) is not None]
    if given_sizes and arguments.part == TARGET:
        parser.error(f"--{given_sizes[0].replace('_', '-')} is a drafter's: name the part ({HEAD}, {MODEL} or {ALL})")
    arguments.device_name = (
        torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
