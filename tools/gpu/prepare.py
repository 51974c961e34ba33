"""What `tools.gpu.measure` needs on a machine that is lent for minutes: `python -m tools.gpu.prepare --out .gpu`.

Kernels, the launches of models of 1B and 8B, golden launches and their results, a plan with the tokens that the CPU
decodes, packages of Python. No GPU is needed. Parts whose sources have not changed are kept.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from commands.arguments import Parser
from commands.console import guarded, stdout
from compiler.build import build
from compiler.held_out import read_prompts
from compiler.recipe import load_recipe
from plans.errors import OutriderError
from plugins.cuda.compile import CUBINS, compile_kernels
from runtime import Runtime
from tools.gpu.bench import Settings
from tools.gpu.models import SHAPES, model_of

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "plans" / "recipes" / "reference.yaml"
CPU, GPU = "onnxruntime-cpu", "cuda"
ARCHITECTURE = "sm_90"
MOST_BYTES = 64 << 20  # of what travels in one call, for measuring or for tests
_TESTED = ("tracked files", "cubins", "native", "wheels", "toys")  # only tests need the last
_PROMPTS, _NEW, _PYTHON = 4, 96, "3.12"  # Python is of the machine that has the GPU

Make = Callable[[Path], object] | str
"""How to fill a file or a folder: a function, or a command of the shell, for which $PART is its path."""


def prepare(out: Path, parts: Mapping[str, tuple[Make, Sequence[str]]]) -> None:
    """Make the `parts` of `out` that are not there or whose sources, files and folders of the repository, have changed.

    Raises `OutriderError` where another process does the same, or where all is too large to travel.
    """
    out.mkdir(parents=True, exist_ok=True)
    os.environ[CUBINS] = str(out / "cubins")  # where kernels that are compiled are kept
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutriderError(f"another process prepares {out}; wait for it, or choose another folder") from None
        for name, (make, sources) in parts.items():
            _make(out, name, make, sources)
    sizes = Counter({"tracked files": sum((ROOT / file).stat().st_size for file in _tracked(":/"))})
    for path in filter(Path.is_file, out.rglob("*")):
        sizes[path.relative_to(out).parts[0]] += path.stat().st_size
    totals = {"measured": sizes.total() - sizes["toys"], "tested": sum(sizes[name] for name in _TESTED)}
    for name, size in {**sizes, **totals}.items():
        stdout.print(f"{name:16} {size:12,} bytes", markup=False)
    if max(totals.values()) > MOST_BYTES:
        name = max(totals, key=totals.__getitem__)
        raise OutriderError(f"what is {name} there has {totals[name]:,} bytes, more than {MOST_BYTES:,}")


def _make(out: Path, name: str, make: Make, sources: Sequence[str]) -> None:
    path, stamps, stamp, began = out / name, out / "stamps.json", hashlib.sha256(), perf_counter()
    for file in _tracked(*sources):
        stamp.update(f"{file} ".encode() + (ROOT / file).read_bytes())
    made = json.loads(stamps.read_text(encoding="utf-8")) if stamps.exists() else {}
    if made.pop(name, "") == stamp.hexdigest() and path.exists():
        return
    stamps.write_text(json.dumps(made), encoding="utf-8")  # a part that is half made has no stamp
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if not path.suffix:
        path.mkdir()
    if callable(make):
        make(path)
    else:
        own = {"PART": str(path), "PYTHON": sys.executable, "PYENV_VERSION": _PYTHON}  # the last for pyenv's python3.12
        subprocess.run(["bash", "-c", make], cwd=ROOT, env=os.environ | own, check=True)
    stamps.write_text(json.dumps({**made, name: stamp.hexdigest()}), encoding="utf-8")
    stdout.print(f"{name}: {perf_counter() - began:.1f} s", markup=False)


def _tracked(*paths: str) -> list[str]:
    """Return files of the repository, tracked or not yet, none that are ignored."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *paths]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(file for file in set(found.split("\0")) if file and (ROOT / file).is_file())


def write_models(folder: Path) -> None:
    for shape, kind in product(SHAPES, ("bfloat16", "int4")):
        text = model_of(SHAPES[shape], kind).model_dump_json(exclude_defaults=True)
        (folder / f"{shape}.{kind}.json").write_text(text, encoding="utf-8")


def pack_plan(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.make_archive(str(path).removesuffix(".tar.xz"), "xztar", _build(Path(folder) / "plan", GPU))


def write_expected(path: Path) -> None:
    held_out = load_recipe(RECIPE).held_out_path
    assert held_out is not None
    with tempfile.TemporaryDirectory() as folder:
        runtime = Runtime.load(_build(Path(folder) / "plan", CPU), backend=CPU)
        prompts = [runtime.tokenizer.encode(text) for text in read_prompts(held_out)[:_PROMPTS]]
        path.write_text(json.dumps(decode_all(runtime, prompts, _NEW)), encoding="utf-8")
        runtime.close()


def _build(out: Path, backend: str) -> Path:
    backends = f"backends=[{CPU}, {{kind: {GPU}, compute_capabilities: [{ARCHITECTURE}]}}]"
    recipe = load_recipe(RECIPE, ["target.weights={type: int4}", "kv_cache=float16", backends])
    build(recipe.for_backends([backend]), RECIPE, out)
    return out


def decode_all(runtime: Runtime, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Return what every drafter decodes, greedy and sampled: ids, and log-probabilities to the bit."""
    runs: dict[str, list[Any]] = {name: [] for name in ("none", *(each.name for each in runtime.manifest.drafters))}
    for drafter, number, temperature in product(runs, range(len(prompts)), (0.0, 0.8)):
        options: dict[str, Any] = {"temperature": temperature, "seed": 5, "logprobs": 0, "max_new_tokens": new}
        options |= {"ignore_eos": True, "auto_disable": False}
        found = runtime.generate(prompts[number], drafter=drafter, **options)
        bits = [float(entry.logprob).hex() for entry in found.logprobs]
        runs[drafter].append({"prompt": number, "options": options, "token_ids": found.token_ids, "logprobs": bits})
    return {"prompts": prompts, "runs": runs}


_TOYS = f'"$PYTHON" -m tests.integration.gpu_plans "$PART" {ARCHITECTURE}'
_GOLDEN = '"$PYTHON" -m tests.plugins.golden "$PART"'
_NATIVE = (
    f'work=$(mktemp -d) && python{_PYTHON} -m pip install -q --no-deps --target "$work" "-Cbuild-dir=$work/build" . && '
    'cp "$work"/plugins/*.so "$PART" && rm -r "$work"'
)
_WHEELS = (  # what the runtime and the tests import and that machine lacks
    f'"$PYTHON" -m pip download -q --only-binary=:all: --python-version {_PYTHON} --platform manylinux_2_31_x86_64 '
    "--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c tools/constraints.txt "
    '-d "$PART" fastapi llguidance openai pydantic uvicorn'
)
_MODELS = ("tools/gpu/models.py", "tools/gpu/step_model.py", "tools/synthetic_llama.py")
_NO_KERNELS = ":(exclude)plugins/csrc/cuda"
_BUILT = ("compiler", "plans", "plugins", "runtime", "tools/gpu/prepare.py")

PARTS: dict[str, tuple[Make, Sequence[str]]] = {
    "settings.json": (lambda path: path.write_text(json.dumps(asdict(Settings()))), ["tools/gpu/bench.py"]),
    "cubins": (
        lambda _: [compile_kernels(ARCHITECTURE, source) for source in ("kernels.cu", "engine.cu")],
        ["plugins/csrc", "plugins/cuda/compile.py"],
    ),
    "engines": (write_models, ["compiler", "plans", "plugins", *_MODELS, _NO_KERNELS]),
    "golden.xz": (_GOLDEN, ["compiler", "plans", "plugins", "tests/plugins", "tools/gpu/golden.py"]),
    "toys": (_TOYS, ["compiler", "plans", "plugins", "tests/conftest.py", "tests/integration/gpu_plans.py"]),
    "plan.tar.xz": (pack_plan, _BUILT),
    "expected.json": (write_expected, (*_BUILT, _NO_KERNELS)),
    "native": (_NATIVE, ["plugins", _NO_KERNELS, "pyproject.toml"]),
    "wheels": (_WHEELS, ["tools/constraints.txt", "tools/gpu/prepare.py"]),
}


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(_parser().parse_args(sys.argv[1:] if given is None else given)))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.gpu.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: %(prog)s --out .gpu",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(".gpu"), help="folder that is filled (default: .gpu)")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    prepare(arguments.out.absolute(), PARTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
