"""What `measure` needs on a machine lent for minutes: `python -m outrider.tools.lab.gpu.prepare --out .gpu`.

Kernels, the launches of models of 1B and 8B, golden launches and their results, a plan with the tokens that the CPU
decodes, packages of Python. No GPU is needed. Parts whose sources have not changed are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from outrider import Runtime
from outrider.commands.arguments import Parser
from outrider.commands.console import guarded, stdout
from outrider.compiler.build import build
from outrider.compiler.held_out import read_prompts
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import OutriderError
from outrider.plans.plan import files_sha256
from outrider.plugins.cuda.compile import CUBINS, compile_kernels
from outrider.runtime.files import locked
from outrider.tools.lab.gpu.models import SHAPES, model_of
from outrider.tools.lab.gpu.stages import Row, bits_of, decode

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "plans" / "recipes" / "reference.yaml"
CPU, GPU, ARCHITECTURE = "onnxruntime-cpu", "cuda", "sm_90"
SETTINGS = {"bytes": 1 << 30, "rows": (1, 8, 32, 512), "keys": 512, "repeats": 24}
"""Bytes that are copied, new tokens of each step, keys in view, and runs of which times are medians."""
MOST_BYTES = 64 << 20  # of what travels in one call, for measuring or for tests
_TESTED = ("tracked files", "cubins", "native", "wheels", "toys")  # only tests need the last
_PROMPTS, _NEW = 4, 96

Make = Callable[[Path], object] | str
"""How to fill a file, or a folder that is there and empty: a function, or a command with its path as {part}."""


def prepare(out: Path, parts: Mapping[str, tuple[Make, Sequence[str]]]) -> int:
    """Make the `parts` of `out` that are not there or whose sources, files and folders of the repository, have changed.

    Raises `OutriderError` where another process does the same, a part cannot be made, or all is too large to travel.
    """
    (out / "stamps").mkdir(parents=True, exist_ok=True)
    os.environ[CUBINS] = str(out / "cubins")  # where kernels that are compiled are kept
    try:
        with locked(out / "lock", wait=False):
            for name, (make, sources) in parts.items():
                _make(out / name, out / "stamps" / name, make, sources)
    except BlockingIOError:
        raise OutriderError(f"another process prepares {out}; wait for it, or choose another folder") from None
    sizes = Counter({"tracked files": sum(file.stat().st_size for file in _tracked(":/").values())})
    for path in filter(Path.is_file, out.rglob("*")):
        sizes[path.relative_to(out).parts[0]] += path.stat().st_size
    totals = {"measured": sizes.total() - sizes["toys"], "tested": sum(sizes[name] for name in _TESTED)}
    for name, size in {**sizes, **totals}.items():
        stdout.print(f"{name:16} {size:12,} bytes", markup=False)
    if max(totals.values()) > MOST_BYTES:
        name = max(totals, key=totals.__getitem__)
        raise OutriderError(f"what is {name} there has {totals[name]:,} bytes, more than {MOST_BYTES:,}; shrink a part")
    return 0


def _make(part: Path, stamp: Path, make: Make, sources: Sequence[str]) -> None:
    began, digest = perf_counter(), files_sha256(_tracked(*sources))
    if part.exists() and stamp.exists() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)  # a part that is half made has no stamp
    if part.is_dir():
        shutil.rmtree(part)
    if not part.suffix:
        part.mkdir()
    if callable(make):
        make(part)
    else:
        words = [word.format(part=part, python=sys.executable) for word in make.split()]
        try:  # the variable is for pyenv's python3.12
            subprocess.run(words, cwd=ROOT, env=os.environ | {"PYENV_VERSION": "3.12"}, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"{part.name} cannot be made: {error}"
            raise OutriderError(f"{reason}; install {words[0]} with pip if it is missing, and run this again") from None
    stamp.write_text(digest)
    stdout.print(f"{part.name}: {perf_counter() - began:.1f} s", markup=False)


def _tracked(*paths: str) -> dict[str, Path]:
    """Return files of the repository by name, tracked or not yet, none that are ignored."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *paths]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name: ROOT / name for name in found.split("\0") if (ROOT / name).is_file()}


def write_models(folder: Path) -> None:
    for shape, kind in product(SHAPES, ("bfloat16", "int4")):
        text = model_of(SHAPES[shape], kind).model_dump_json(exclude_defaults=True)
        (folder / f"{shape}.{kind}.json").write_text(text, encoding="utf-8")


def pack_plan(path: Path) -> None:
    with TemporaryDirectory() as folder:
        shutil.make_archive(str(path).removesuffix(".tar.xz"), "xztar", _build(Path(folder) / "plan", GPU))


def write_expected(path: Path) -> None:
    texts = read_prompts(ROOT / "plans" / "reference" / "held_out.jsonl.gz")[:_PROMPTS]
    with TemporaryDirectory() as folder, Runtime.load(_build(Path(folder) / "plan", CPU), backend=CPU) as runtime:
        prompts = [runtime.tokenizer.encode(text) for text in texts]
        path.write_text(json.dumps(decode_all(runtime, prompts, _NEW)), encoding="utf-8")


def _build(out: Path, backend: str) -> Path:
    backends = f"backends=[{CPU}, {{kind: {GPU}, compute_capabilities: [{ARCHITECTURE}]}}]"
    recipe = load_recipe(RECIPE, ["target.weights={type: int4}", "kv_cache=float16", backends])
    build(recipe.for_backends([backend]), RECIPE, out)
    return out


def decode_all(runtime: Runtime, prompts: list[list[int]], new: int) -> dict[str, list[Row]]:
    """Return runs of every drafter, greedy and sampled, with the tokens and bits that they decode."""
    fixed = {"seed": 5, "logprobs": 0, "max_new_tokens": new, "ignore_eos": True, "auto_disable": False}
    session, found = runtime.session(), dict[str, list[Row]]()
    drafters = ("none", *(each.name for each in runtime.manifest.drafters))
    for drafter, prompt, temperature in product(drafters, prompts, (0.0, 0.8)):
        run = {"prompt": prompt, "options": {**fixed, "drafter": drafter, "temperature": temperature}}
        found.setdefault(drafter, []).append({**run, "tokens": bits_of(decode(session, run))})
    return found


_WHEELS = (  # what the runtime and the tests import and the machine with the GPU lacks, whose Python is 3.12
    "{python} -m pip download -q --only-binary=:all: --python-version 3.12 --platform manylinux_2_31_x86_64 "
    "--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c tools/constraints.txt -d {part} "
    "fastapi llguidance openai pydantic uvicorn"
)
_NATIVE = "python3.12 -m pip wheel -q --no-deps -Cwheel.packages=plugins -Cwheel.exclude=plugins/** -w {part} ."
_NO_KERNELS = ":(exclude)plugins/csrc/cuda"
_COMPILED = ("compiler", "plans", "plugins")
_OWN, _STAGES = "tools/lab/gpu/prepare.py", "tools/lab/gpu/stages.py"

PARTS: dict[str, tuple[Make, Sequence[str]]] = {
    "settings.json": (lambda path: path.write_text(json.dumps(SETTINGS)), [_OWN]),
    "cubins": (
        lambda _: [compile_kernels(ARCHITECTURE, source) for source in ("kernels.cu", "engine.cu")],
        ["plugins/csrc", "plugins/cuda/compile.py"],
    ),
    "engines": (
        write_models,
        [*_COMPILED, _STAGES, "tools/lab/gpu/models.py", "tools/lab/synthetic_llama.py", _NO_KERNELS],
    ),
    "golden.xz": ("{python} -m tests.plugins.golden {part}", [*_COMPILED, "tests/plugins", _STAGES]),
    "toys": (
        f"{{python}} -m tests.integration.gpu_plans {{part}} {ARCHITECTURE}",
        [*_COMPILED, "tests/conftest.py", "tests/integration/gpu_plans.py"],
    ),
    "plan.tar.xz": (pack_plan, [*_COMPILED, "runtime", _OWN]),
    "expected.json": (write_expected, [*_COMPILED, "runtime", _OWN, _STAGES, _NO_KERNELS]),
    "native": (_NATIVE, ["plugins", _NO_KERNELS, "pyproject.toml", _OWN]),
    "wheels": (_WHEELS, ["tools/constraints.txt", _OWN]),
}


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: prepare(_parser().parse_args(given).out.absolute(), PARTS))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.gpu.prepare", epilog="example: %(prog)s --out .gpu",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(".gpu"), help="folder that is filled (default: .gpu)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
