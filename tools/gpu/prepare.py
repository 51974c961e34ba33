"""What `tools.gpu.measure` needs on a machine that is lent for minutes: `python -m tools.gpu.prepare --out .gpu`.

Kernels and variants of them, the launches of models of 1B and 8B, golden launches and their results, a plan with the
tokens that the CPU decodes, packages of Python. No GPU is needed. What has been made of the same sources is kept.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
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
from plugins.cuda.compile import CUBINS, SOURCES, compile_kernels
from runtime import Runtime
from tools.gpu.bench import Settings
from tools.gpu.models import SHAPES, model_of
from tools.gpu.variants import VARIANTS, write_variant

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "plans" / "recipes" / "reference.yaml"
CPU, GPU = "onnxruntime-cpu", "cuda"
ARCHITECTURE = "sm_90"
MOST_BYTES = 60 << 20  # with the tracked files, which travel too
_PROMPTS, _NEW = 4, 96
_WEIGHTS = ("bfloat16", "int4")
_NO_KERNELS = ":(exclude)plugins/csrc/cuda"  # of what has none of them
_PYTHON = "3.12"
_PLATFORMS = tuple(f"manylinux{kind}_x86_64" for kind in ("_2_31", "_2_28", "_2_17", "2014"))
_CHANGES = ("target.weights={type: int4}", "kv_cache=float16")


class Preparation:
    """The folder that is filled. A part is made where the files that it is made of have changed since."""

    def __init__(self, out: Path) -> None:
        self.out, self._stamps = out, out / "stamps.json"
        out.mkdir(parents=True, exist_ok=True)
        os.environ[CUBINS] = str(out / "cubins")
        self._made: dict[str, str] = json.loads(self._stamps.read_text()) if self._stamps.exists() else {}

    def make(self, name: str, make: Callable[[Path], None], *sources: str) -> None:
        """Let `make` fill `name`, a file or a folder; `sources` are files or folders of the repository."""
        stamp, path = hashlib.sha256(), self.out / name
        for file in _tracked(*sources):
            stamp.update(f"{file} ".encode() + (ROOT / file).read_bytes())
        if self._made.get(name) == stamp.hexdigest() and path.exists():
            return
        began = perf_counter()
        if path.is_dir():
            shutil.rmtree(path)
        if not path.suffix:
            path.mkdir(parents=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        self._made[name] = stamp.hexdigest()
        self._stamps.write_text(json.dumps(self._made, indent=1))
        stdout.print(f"{name}: {perf_counter() - began:.1f} s", markup=False)


def _tracked(*paths: str) -> list[str]:
    """Return files of the repository, tracked or not yet, none that are ignored."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *paths]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(file for file in set(found.split("\0")) if file and (ROOT / file).is_file())


def prepare(out: Path) -> None:
    """Fill `out`. Raises `OutriderError` where it is too large to travel."""
    made, kernels = Preparation(out), "plugins/csrc"
    Settings().write(out / "settings.json")
    for source in ("kernels.cu", "engine.cu"):  # those of the tests on a GPU
        made.make(f"cubins/{source}.made", partial(_keep, source), kernels)
    made.make(f"engine.{ARCHITECTURE}.cubin", lambda path: _compile(path, "engine.cu", SOURCES), kernels)
    made.make(f"probe.{ARCHITECTURE}.cubin", _compile_probe, kernels, "tools/gpu/probe.cu")
    made.make("variants", _compile_variants, kernels, "tools/gpu/variants.py")
    for shape, kind in product(SHAPES, _WEIGHTS):
        made.make(
            f"engines/{shape}.{kind}.json",
            partial(_write_model, shape, kind),
            "compiler", "plans/*.py", "plugins/*.py", "plugins/cuda", "tools/gpu/models.py", "tools/gpu/step_model.py",
        )  # fmt: skip
    made.make("golden.npz", _write_golden, "plugins", "tests/plugins", "tools/gpu/golden.py")
    built = ("compiler", "plans", "plugins", "runtime", "tools/gpu/prepare.py")
    made.make("plan.tar.xz", _pack_plan, *built)
    made.make("expected.json", _write_expected, *built, _NO_KERNELS)
    made.make("native", _build_native, "plugins", _NO_KERNELS, "pyproject.toml")
    made.make("wheels", _download_wheels, "tools/constraints.txt", "tools/gpu/prepare.py")
    _report_bytes(out)


def _write_model(shape: str, kind: str, path: Path) -> None:
    path.write_text(model_of(SHAPES[shape], kind).model_dump_json(exclude_defaults=True), encoding="utf-8")


def _compile(path: Path, source: str, sources: Path) -> None:
    path.write_bytes(compile_kernels(ARCHITECTURE, source, sources))


def _keep(source: str, path: Path) -> None:
    for old in path.parent.glob(f"*.{Path(source).stem}.*.cubin"):
        old.unlink()
    compile_kernels(ARCHITECTURE, source)
    path.touch()


def _with_sources(write: Callable[[Path], object], path: Path, source: str) -> None:
    """Compile `source` of changed sources, which `write` writes; nothing of them is kept beside it."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        kept = os.environ.pop(CUBINS)
        try:
            _compile(path, source, Path(folder))
        finally:
            os.environ[CUBINS] = kept


def _compile_probe(path: Path) -> None:
    def write(folder: Path) -> None:
        shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
        shutil.copy(ROOT / "tools" / "gpu" / "probe.cu", folder / "cuda")

    _with_sources(write, path, "probe.cu")


def _compile_variants(folder: Path) -> None:
    for name, changes in VARIANTS.items():
        _with_sources(
            partial(write_variant, name, changes),
            cubin := folder / f"{name}.cubin",
            "engine.cu",
        )
        (folder / f"{name}.cubin.xz").write_bytes(lzma.compress(cubin.read_bytes()))
        cubin.unlink()


def _write_golden(path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.plugins.golden", str(path)], cwd=ROOT, check=True)


def _pack_plan(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w:xz") as file:
        (own := Path(folder) / "plan").mkdir()
        _build(own, GPU)
        file.add(own, "plan")


def _build(out: Path, backend: str) -> None:
    backends = f"backends=[{CPU}, {{kind: {GPU}, compute_capabilities: [{ARCHITECTURE}]}}]"
    recipe = load_recipe(RECIPE, [*_CHANGES, backends])
    out.rmdir()
    build(recipe.for_backends([backend]), RECIPE, out)


def _write_expected(path: Path) -> None:
    held_out = load_recipe(RECIPE).held_out_path
    assert held_out is not None
    with tempfile.TemporaryDirectory() as folder:
        (own := Path(folder) / "plan").mkdir()
        _build(own, CPU)
        runtime = Runtime.load(own, backend=CPU)
        prompts = [runtime.tokenizer.encode(text) for text in read_prompts(held_out)[:_PROMPTS]]
        path.write_text(json.dumps(decode_all(runtime, prompts, _NEW)), encoding="utf-8")
        runtime.close()


def decode_all(runtime: Runtime, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Return what every drafter decodes, greedy and sampled: ids, and log-probabilities to the bit."""
    runs: dict[str, list[Any]] = {}
    for drafter in ("none", *(each.name for each in runtime.manifest.drafters)):
        runs[drafter] = []
        for number, temperature in product(range(len(prompts)), (0.0, 0.8)):
            options: dict[str, Any] = {"temperature": temperature, "seed": 5, "logprobs": 0, "max_new_tokens": new}
            options |= {"ignore_eos": True, "auto_disable": False}
            found = runtime.generate(prompts[number], drafter=drafter, **options)
            bits = [float(entry.logprob).hex() for entry in found.logprobs or ()]
            run = {"prompt": number, "options": options, "token_ids": found.token_ids, "logprobs": bits}
            runs[drafter].append(run)
    return {"prompts": prompts, "runs": runs}


def _build_native(folder: Path) -> None:
    """Build the extension for the Python of the other machine."""
    python = next(iter(sorted(Path.home().glob(f".pyenv/versions/{_PYTHON}.*/bin/python"))), None)
    found = str(python) if python else shutil.which(f"python{_PYTHON}")
    if found is None:
        raise OutriderError(f"the extension is built with Python {_PYTHON}, which is not here; install it")
    with tempfile.TemporaryDirectory() as work:
        pip = [found, "-m", "pip", "wheel", "-q", "--no-deps", f"-Cbuild-dir={work}/build", "-w", work, str(ROOT)]
        subprocess.run(pip, check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            for name in file.namelist():
                if name.startswith("plugins/") and name.endswith(".so"):
                    (folder / Path(name).name).write_bytes(file.read(name))


def _download_wheels(folder: Path) -> None:
    from importlib.metadata import requires, version

    listed = dict(line.split("==") for line in (ROOT / "tools" / "constraints.txt").read_text().split())
    pydantic = listed["pydantic"]
    (core,) = [each.split(";")[0].strip() for each in requires("pydantic") or () if each.startswith("pydantic-core")]
    assert version("pydantic") == pydantic, "pydantic-core is of the version that the pydantic here requires"
    # llguidance is loaded with the first grammar, and none is asked for there.
    packages = [f"pydantic=={pydantic}", core, "annotated-types", "typing-inspection"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    pip += ["--python-version", _PYTHON, "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    subprocess.run([*pip, *(word for each in _PLATFORMS for word in ("--platform", each)), *packages], check=True)


def _report_bytes(out: Path) -> None:
    parts = {path.name: _size(path) for path in sorted(out.iterdir())}
    parts["tracked files"] = sum((ROOT / file).stat().st_size for file in _tracked(":/"))
    total = sum(parts.values())
    for name, size in [*parts.items(), ("in all", total)]:
        stdout.print(f"{name:24} {size / 2**20:8.2f} MiB", markup=False)
    if total > MOST_BYTES:
        raise OutriderError(f"{out} and the tracked files have {total >> 20} MiB, more than {MOST_BYTES >> 20}")


def _size(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(sys.argv[1:] if given is None else given))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.gpu.prepare",
        description=__doc__,
        epilog="example: %(prog)s --out .gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path(".gpu"), help="folder that is filled (default: .gpu)")
    return parser


def _run(given: list[str]) -> int:
    prepare(_parser().parse_args(given).out.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
