"""A draft head with few bits: `python -m outrider.tools.lab.reference.pack HEAD [--bits 8] [--out DIR]`.

Reads a head in floats, of any layout that is read, and writes it with its matrices as integers and all else as it
was (`compressed.py`). Without `--out` it takes the place of the one that was read.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from safetensors.torch import save_file

from outrider.commands.arguments import Parser
from outrider.commands.console import guarded, stdout
from outrider.compiler.models.config_reader import read_json
from outrider.compiler.models.quantization import BITS, SETTINGS
from outrider.compiler.weights import SINGLE, Weights, check_folder
from outrider.plans.errors import CheckpointError
from outrider.tools.lab.reference.compressed import GROUP, Compressed, compress
from outrider.tools.lab.reference.export import write_json

_OF_HEADS = "fc.weight"
_CONFIG = "config.json"


def pack(folder: Path, bits: int, out: Path) -> Compressed:
    """Write the head in `folder` to `out`, which may be the same, with matrices of `bits` bits; return what it is.

    Raises `CheckpointError` for a folder that holds no head in floats, or nothing that can be packed.
    """
    check_folder(folder)
    raw, stored = read_json(folder / _CONFIG), Weights(folder, pickled=True)
    key = next((key for key in SETTINGS if raw.get(key)), None)
    if key is not None:
        raise CheckpointError(f"{folder / _CONFIG} has {key}: the head is packed already; give it as it was trained")
    if _OF_HEADS not in stored.found:
        raise CheckpointError(f"{stored.source}: tensor {_OF_HEADS!r} is missing, so this is no draft head; give one")
    if out == folder and stored.source.name != SINGLE:
        raise CheckpointError(f"{folder} holds {stored.source.name}, beside which no {SINGLE} belongs; name an --out")
    try:
        made = compress({name: stored.read(name) for name in stored.found}, bits)
    except CheckpointError as error:
        raise CheckpointError(f"{stored.source}: {error}") from None
    if not made.packed:
        raise CheckpointError(f"{stored.source}: no projection has a multiple of {GROUP} inputs; leave it as it is")
    out.mkdir(parents=True, exist_ok=True)
    weights, config = out / f"{SINGLE}.part", out / f"{_CONFIG}.part"
    save_file(made.tensors, weights, metadata={"format": "pt"})
    write_json(config, raw | {SETTINGS[0]: made.settings})
    os.replace(weights, out / SINGLE)
    os.replace(config, out / _CONFIG)
    return made


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(_parser().parse_args(given)))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.reference.pack",
        description=__doc__,
        epilog="example: %(prog)s plans/reference/eagle3 --bits 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the head's checkpoint")
    parser.add_argument("--bits", choices=[str(bits) for bits in BITS], default="8", help="of an integer (default 8)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where it is written (default: where it was)")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    out: Path = arguments.out or folder
    before = sum(file.stat().st_size for file in folder.glob("*") if file.suffix in (".safetensors", ".bin"))
    made = pack(folder, int(arguments.bits), out)
    stdout.print(
        f"{out}: {len(made.packed)} matrices in int{made.bits}, {before / 1e6:.2f} MB before and "
        f"{(out / SINGLE).stat().st_size / 1e6:.2f} MB now; rounding moved no number by more than {made.error:.3g} "
        f"({made.worst})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
