"""Plans that tests share: a small toy with random weights (fast), and the reference plan (real text)."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import yaml
from hypothesis import settings
from onnxruntime import SessionOptions
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import outrider.compiler.export.draft
import outrider.compiler.export.target
from outrider import Runtime, SchedulerConfig
from outrider.compiler.build import build
from outrider.compiler.export import tracing
from outrider.compiler.recipe import load_recipe
from outrider.plans.manifest import Engine
from outrider.plans.plan import Plan, open_plan
from outrider.plugins.cuda import compile
from outrider.plugins.cuda.compile import CUBINS
from outrider.runtime.backends.base import LoadedEngine, Settings
from outrider.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from outrider.runtime.branch_request import MODES
from outrider.runtime.drafters import adaptive
from outrider.runtime.drafters.adaptive import AdaptiveSpeculations
from outrider.runtime.kv.partial_policy import Interval
from tests.compiler.block_heads import write_block
from tests.compiler.eagle3_heads import write_eagle3
from tests.exports import SharedExports, sources_digest
from tests.fake_cuda import compile_libraries
from tests.fake_cuda.provider import CudaProvider
from tests.packages import install_apart
from tests.plans.damage import edit
from tests.plugins.emulator import ENGINES, Emulator, compile_emulator
from tests.plugins.tensorrt_stand_in import StandIn, compile_shells

# A profile decides how many examples a property has, by default few: `--hypothesis-profile long` searches.
settings.register_profile("short", max_examples=7, deadline=None)
settings.register_profile("long", max_examples=200, deadline=None)
settings.load_profile("short")

logging.getLogger("torch.__trace").disabled = True  # pytest would print thousands of lines of it for a test that fails

REPOSITORY = Path(__file__).resolve().parent.parent
REFERENCE_RECIPE = REPOSITORY / "plans" / "recipes" / "reference.yaml"
HELD_OUT = REPOSITORY / "plans" / "reference" / "held_out.jsonl.gz"

TOY_RECIPE = """\
name: toy
target:
  checkpoint: target
drafters:
  - {name: ngram, kind: ngram, max_context: 3, min_context: 1, max_draft: 6}
  - {name: short, kind: ngram, max_context: 1, max_draft: 2, filler_top_k: 3}
  - {name: chain, kind: model, checkpoint: drafter, gamma: 4}
  - {name: bushy, kind: model, checkpoint: drafter, tree: {top_k: 3, depth: 2, nodes: 9}}
  - {name: head, kind: eagle3, checkpoint: head, tree: {top_k: 4, depth: 2, nodes: 12}}
  - {name: block, kind: block, checkpoint: block}
  - {name: mixed, kind: ngram, max_draft: 6, otherwise: head, least: 2}
capacity:
  context: 160
  prefill_chunk: 16
"""
TOY_PROMPTS = ("import os\nimport sys\n", "def main() -> None:\n    return", "def main(x): return", "x")
TOY_DRAFTERS = [section["name"] for section in yaml.safe_load(TOY_RECIPE)["drafters"]]


TOY_SIZES: dict[str, object] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.35,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
TOY_EXPERTS: dict[str, object] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def _toy_model(sizes: dict[str, object]) -> PreTrainedModel:
    if "num_experts" in sizes:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    return Qwen3ForCausalLM(Qwen3Config(**sizes))


def train_byte_level(
    texts: Sequence[str],
    size: int,
    special: Sequence[str],
    split: pre_tokenizers.PreTokenizer | None = None,
    *,
    ignore_merges: bool = False,
) -> Tokenizer:
    """A byte-level tokenizer of `size` tokens, the `special` ones first, which splits texts as GPT-2's by default."""
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_toy_checkpoint(folder: Path, noise: float = 0.0, *, experts: bool = False) -> None:
    """A Qwen3 with weights large enough that its choices vary, and a byte-level tokenizer.

    With `noise`, its first layer alone, with weights disturbed by this share of their spread: a drafter that is often
    right, since the other layers add less to the residual stream. With `experts`, layers have experts, all but one.
    """
    torch.manual_seed(1)
    sizes = TOY_SIZES | (TOY_EXPERTS if experts else {})
    model: PreTrainedModel = _toy_model(sizes)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.25
            for name, parameter in layer.mlp.named_parameters():
                if "down_proj" in name:
                    parameter *= 0.25
        if noise:
            first = _toy_model(sizes | {"num_hidden_layers": 1})
            first.load_state_dict(model.state_dict(), strict=False)
            model = first
            for parameter in model.parameters():
                parameter += noise * parameter.std(correction=0) * torch.randn_like(parameter)
    model.save_pretrained(folder)
    license = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")  # which never changes
    tokenizer = train_byte_level([license], 300, ["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))


def write_toy_block(folder: Path, target: Path) -> None:
    """A DSpark head with random layers, whose bias by the token before knows what followed it in the target's texts.

    It reads other layers of the target than the EAGLE3 head. Each token has a code: the bias of the token that follows
    it is the product of the code with itself, and of two codes next to nothing.
    """
    rank = 48
    tensors = write_block(
        folder, layout="deepspec", streams=(0, 2), hidden=32, vocab=300, mask=299, target_layers=3, head_dim=16,
        block_size=5, markov=("vanilla", rank), confidence="markov",
    )  # fmt: skip
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), Tokenizer.from_file(str(target / "tokenizer.json"))
    with torch.no_grad():
        follows = model(torch.arange(300).unsqueeze(1)).logits[:, -1].argmax(-1)
        for prompt in TOY_PROMPTS:
            text = torch.tensor([tokenizer.encode(prompt).ids])
            text = model.generate(text, max_new_tokens=100, do_sample=False, eos_token_id=299, pad_token_id=299)[0]
            follows[text[:-1]] = text[1:]
    codes = torch.randn(300, rank, generator=torch.Generator().manual_seed(2))
    tensors["markov_head.markov_w1.weight"] = codes
    tensors["markov_head.markov_w2.weight"] = torch.zeros(300, rank).index_add(0, follows, codes)
    save_file(tensors, folder / "model.safetensors")


def _met(case: pytest.Function) -> set[tuple[object, ...]]:
    """What a case meets: the values of each fixture's parameter, and of the names that one decorator gives together."""
    tables = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [[n.strip() for n in each.split(",")] if isinstance(each, str) else list(each) for each in tables]
    names += [[name] for name in case.callspec.params.keys() - {name for each in names for name in each}]
    return {(*each, *(repr(case.callspec.params.get(name)) for name in each)) for each in names}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test's grid the short run meets each value of each parameter, in few cases; the long one takes all of them.

    A test that is named is run whole.
    """
    if any("::" in argument for argument in config.args):
        return
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        apart = any(item.get_closest_marker(name) for name in ("long", "gpu"))  # a GPU's tests are run by their marker
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not apart:
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        met = {id(case): _met(case) for case in cases}
        left, times = set[tuple[object, ...]]().union(*met.values()), Counter[tuple[object, ...]]()
        while left:  # among cases that meet as many new values, one of values that were met least
            case = max(cases, key=lambda case: (len(left & met[id(case)]), -sum(times[each] for each in met[id(case)])))
            left -= met[id(case)]
            times.update(met[id(case)])
            cases.remove(case)
        for case in cases:
            case.add_marker("long")


EXPORTS = (outrider.compiler.export.draft, outrider.compiler.export.target)
"""Modules whose `trace` is shared."""
_KEPT = 24 * 3600.0  # seconds for which exports and libraries are kept of code that has changed

# Exports and compilers leave millions of objects alive, which every collection of the oldest generation goes over.
gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Where processes share the tests, the first one compiles them, and the others read what it compiled."""
    folder = REPOSITORY / "build"
    folder.mkdir(exist_ok=True)
    with open(folder / "collection.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """What imports have made is there to the end: no collection goes over it again."""
    gc.freeze()


@pytest.fixture(scope="session")
def patches() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="session", autouse=True)
def _own_machine(patches: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No probe that the user's cache folder remembers decides anything here; nearly all models of the tests are too
    small to be shared between threads, which would only wait for each other."""
    torch.set_num_threads(1)
    patches.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """What a command does to the log `outrider` in this process ends with its test."""
    logger = logging.getLogger("outrider")
    level, handlers, propagate = logger.level, [*logger.handlers], logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A file or folder that one of the processes that run the tests makes, and all of them read.

    Where OUTRIDER_MADE names a folder, they are kept there for other runs of the same sources.
    """
    root = factory.getbasetemp()
    kept = os.environ.get("OUTRIDER_MADE") or (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root)
    return made_in(Path(kept).absolute(), name, make)


def made_in(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """As `made_once`, in a folder that may be there for later runs."""
    made = root / f"{name.replace('/', '.')}.made"
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(root / name, ignore_errors=True)  # of a run that was ended while it made it
            make(root / name)
            made.touch()
    return root / name


def kept_folder(kind: str, digest: str) -> Path:
    """A folder of `build/`, for what any run makes of the sources of `digest`."""
    kept = REPOSITORY / "build" / kind / digest
    kept.mkdir(parents=True, exist_ok=True)
    kept.touch()
    for other in kept.parent.glob("*"):
        if other.stat().st_mtime < kept.stat().st_mtime - _KEPT:  # another run may be under way
            shutil.rmtree(other, ignore_errors=True)
    return kept


@cache
def _of_kernels() -> Path:
    """Of what is compiled of kernels and of what stands for a device: by their sources, and by the compilers."""
    compilers = (
        subprocess.run(["g++", "--version"], check=True, capture_output=True).stdout if shutil.which("g++") else b""
    )
    digest = hashlib.sha256(f"{platform.machine()} {compile._nvrtc_version()}".encode() + compilers)
    for folder in (compile.SOURCES.parent, REPOSITORY / "tests" / "plugins", REPOSITORY / "tests" / "fake_cuda"):
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".cc", ".cu", ".h", ".py") and not file.name.startswith("test_"):
                digest.update(str(file).encode() + file.read_bytes())
    return kept_folder("kernels", digest.hexdigest()[:16])


def compiled_once(name: str, make: Callable[[Path], object]) -> Path:
    """As `made_once`, of what `_of_kernels` has all sources of: kept for later runs."""
    return made_in(_of_kernels(), name, make)


@pytest.fixture(scope="session", autouse=True)
def _kept_cubins(patches: pytest.MonkeyPatch) -> None:
    """No kernels are compiled twice, by any process, nor at once by two, nor in a later run."""
    os.environ.setdefault(CUBINS, str(_of_kernels() / "cubins"))
    compiled = compile._compile

    def once(architecture: str, source: str, sources: Path) -> bytes:
        if sources != compile.SOURCES or Path(source).is_absolute():
            return compiled(architecture, source, sources)
        name = f"{architecture}.{source}.cubin"
        return compiled_once(name, lambda out: out.write_bytes(compiled(architecture, source, sources))).read_bytes()

    patches.setattr(compile, "_compile", once)


@pytest.fixture(scope="session", autouse=True)
def _shared_exports(patches: pytest.MonkeyPatch) -> None:
    """No graph is exported twice, nor in a later run, unless what exports it has changed."""
    kept = kept_folder("exports", sources_digest())
    shared = SharedExports(lambda name, make: made_in(kept, name, make))
    for exports in EXPORTS:
        patches.setattr(exports, "trace", shared)


@pytest.fixture(scope="session", autouse=True)
def _shared_sessions(patches: pytest.MonkeyPatch) -> None:
    """An engine that is on one thread is opened once in a process, for all runtimes of a plan: it keeps nothing. The
    threads of others sleep while there is nothing to do, where else they spin: tests share the cores."""
    load, options, on_one_thread = OnnxRuntimeCpu.load, OnnxRuntimeCpu._options, Settings(threads=1)

    @lru_cache(maxsize=64)
    def opened(path: Path, engine: str, _files: object) -> LoadedEngine:
        return load(OnnxRuntimeCpu(on_one_thread), path, Engine.model_validate_json(engine))

    def shared(backend: OnnxRuntimeCpu, path: Path, engine: Engine) -> LoadedEngine:
        if backend._settings != on_one_thread:
            return load(backend, path, engine)
        files = sorted((file.inode(), file.stat().st_mtime_ns) for file in os.scandir(path.parent))  # weights too
        return opened(path, engine.model_dump_json(), tuple(files))

    def sleeping(backend: OnnxRuntimeCpu, engine: Engine) -> SessionOptions:
        found = options(backend, engine)
        found.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return found

    patches.setattr(OnnxRuntimeCpu, "load", shared)
    patches.setattr(OnnxRuntimeCpu, "_options", sleeping)


@pytest.fixture
def fresh_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph is exported, whether it was or not."""
    for exports in EXPORTS:
        monkeypatch.setattr(exports, "trace", tracing.trace)


def write_toy(folder: Path, *, experts: bool = False) -> None:
    """The toy's recipe, checkpoints and prompts; with `experts`, its target and its draft models have experts."""
    write_toy_checkpoint(folder / "target", experts=experts)
    write_toy_checkpoint(folder / "drafter", noise=0.05, experts=experts)
    write_eagle3(folder / "head", target_hidden=32, vocab=300, draft_vocab=120, aux_layer_ids=[0, 1, 2])
    write_toy_block(folder / "block", folder / "target")
    (folder / "model.yaml").write_text(TOY_RECIPE, encoding="utf-8")
    rows = [{"prompt": prompt} for prompt in TOY_PROMPTS[:2]]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


@pytest.fixture(scope="session")
def toy_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "toy", write_toy) / "model.yaml"


class BuildOnce(Protocol):
    """Build a plan of a recipe, by default the toy's, with overrides; once for all tests that use the name."""

    def __call__(self, name: str, overrides: Sequence[str] = (), recipe: Path | None = None) -> Path: ...


@pytest.fixture(scope="session")
def built(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildOnce:
    def build_once(name: str, overrides: Sequence[str] = (), recipe: Path | None = None) -> Path:
        path = recipe or toy_recipe
        return made_once(tmp_path_factory, name, lambda out: build(load_recipe(path, list(overrides)), path, out))

    return build_once


@pytest.fixture(scope="session")
def toy_plan(built: BuildOnce) -> Path:
    return built("toy/plan")


@pytest.fixture(scope="session")
def branch_plan(built: BuildOnce) -> Path:
    """A plan of the toy for sixteen branches, in both modes, with every drafter; its graphs are of `EVERYTHING`."""
    return built("branch-plan", EVERYTHING[1:])


@pytest.fixture(scope="session")
def branching(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


REJECTING = {
    "classical": "{name: classical, kind: model, checkpoint: drafter, gamma: 3, acceptance: rejection}",
    "classical-block": "{name: classical-block, kind: block, checkpoint: block, gamma: 3, acceptance: rejection}",
    "classical-head": "{name: classical-head, kind: eagle3, checkpoint: head, tree: {top_k: 1, depth: 1, nodes: 3}, "
    "acceptance: rejection}",
}


_EVERY_DRAFTER = [line[4:] for line in TOY_RECIPE.splitlines() if line.startswith("  - {")] + [*REJECTING.values()]
PARTIAL_KV = (
    "{enabled: true, block_size: 4, n_sink_blocks: 1, n_retrieval_blocks: 3, n_window_blocks: 2, "
    "n_spec_tokens_buf: 16, partial_threshold: 30, full_refresh_interval: 4, n_draft_window_tokens: 20}"
)
EVERYTHING = [
    f"drafters=[{', '.join(_EVERY_DRAFTER)}]",
    f"partial_kv={PARTIAL_KV[:-1]}, mode: off}}",
    "capacity={context: 160, prefill_chunk: 16, branches: 16, batching: true}",  # graphs as of `branch_plan`
]
"""Overrides of the toy's recipe that make a plan of everything that there is."""


@pytest.fixture(scope="session")
def long_plan(built: BuildOnce) -> Path:
    """A plan of the toy with partial KV, in force after 30 tokens, and drafters that keep 20 to 40."""
    return built("long-plan", [f"partial_kv={PARTIAL_KV}"])


@pytest.fixture(scope="session")
def everything_plan(built: BuildOnce) -> Path:
    """Every drafter, by rejection as well, partial KV for who asks, sixteen sequences in one row or in a row each."""
    return built("everything-plan", EVERYTHING)


@pytest.fixture(scope="session")
def everything(everything_plan: Path) -> Runtime:
    return Runtime.load(everything_plan, threads=1)


@pytest.fixture(scope="module", params=MODES)
def serving(everything_plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with Runtime.load(everything_plan, threads=1, scheduler=SchedulerConfig(mode=request.param)) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def long(long_plan: Path) -> Runtime:
    return Runtime.load(long_plan, threads=1)


@pytest.fixture
def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays or not: on the toy, whose KV caches cost the same, the clock would soon say that it does not."""
    monkeypatch.setattr(Interval, "ahead", property(lambda self: True))


@pytest.fixture(scope="session")
def toy(toy_plan: Path) -> Runtime:
    return Runtime.load(toy_plan, threads=1)


def forget_what_drafting_cost(runtime: Runtime) -> None:
    """Let adaptive speculation begin afresh: what earlier tests measured stands for their sizes of windows."""
    for engine in runtime.engines.loops:
        engine.parts.adaptive = AdaptiveSpeculations(engine.manifest)


def call_before(patch: pytest.MonkeyPatch, owner: object, name: str, do: Callable[..., object]) -> None:
    """Let `do` be called with the arguments of each call of `owner.name`, before it."""
    called = getattr(owner, name)

    def both(*arguments: Any, **options: Any) -> Any:
        do(*arguments, **options)
        return called(*arguments, **options)

    patch.setattr(owner, name, both)


def drafting_never_pays(patch: pytest.MonkeyPatch, disabled_rounds: int = adaptive.DISABLED_ROUNDS) -> None:
    """Independent of the clock; drafters are disabled for `disabled_rounds`."""
    patch.setattr(adaptive.AdaptiveSpeculation, "gain", lambda self: 0.5)
    for name, value in (("WINDOW", 4), ("BURST", 2), ("DISABLED_ROUNDS", disabled_rounds)):
        patch.setattr(adaptive, name, value)


@pytest.fixture(scope="session")
def ending_plan(toy: Runtime, toy_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The toy's plan with several end tokens, and prompts with the number of tokens up to the first of them.

    None of them is a special token: as text it would be seen.
    """
    prompts = ("import os\n", "def main(")
    texts = {prompt: toy.generate(prompt, max_new_tokens=30, ignore_eos=True).token_ids for prompt in prompts}
    ends = [ids[4] for ids in texts.values()]
    plan = shutil.copytree(toy_plan, tmp_path_factory.mktemp("ends") / "plan")
    edit(plan, lambda manifest: manifest["text"].update(eos_token_ids=[298, *ends]))
    return plan, {prompt: 1 + next(i for i, token in enumerate(ids) if token in ends) for prompt, ids in texts.items()}


@pytest.fixture(scope="session")
def reference_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference plan, kept in `build/reference`: an unchanged one is not built again."""
    out = REPOSITORY / "build" / "reference"
    out.parent.mkdir(exist_ok=True)
    made_once(tmp_path_factory, "reference-plan", lambda _: build(load_recipe(REFERENCE_RECIPE), REFERENCE_RECIPE, out))
    return out


@pytest.fixture(scope="session")
def reference(reference_plan: Path) -> Runtime:
    return Runtime.load(reference_plan)


def compiled_with_gxx(name: str, make: Callable[[Path], object]) -> Path:
    """As `compiled_once`; the test is skipped where there is no compiler."""
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("it is compiled with g++, for Linux")
    return compiled_once(name, make)


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    """Our ops' CUDA kernels on the CPU."""
    return Emulator(compiled_with_gxx("emulator.so", compile_emulator))


@pytest.fixture(scope="session")
def engine_emulator() -> Emulator:
    """Our ops' CUDA kernels and those of engines on the CPU."""
    return Emulator(compiled_with_gxx("engines.so", lambda out: compile_emulator(out, ENGINES)))


@pytest.fixture(scope="session")
def fake_cuda() -> Path:
    """The folder of CUDA's libraries for a machine without a GPU."""
    return compiled_with_gxx("fake-cuda", compile_libraries)


@pytest.fixture(scope="session")
def cuda_provider(fake_cuda: Path) -> CudaProvider:
    """ONNX Runtime's real CUDA provider, of the version that the tests run with; kept in `build/`."""
    requirement = f"onnxruntime-gpu=={version('onnxruntime')}"
    kept = REPOSITORY / "build" / "cuda_provider" / f"{requirement}-{sys.implementation.cache_tag}"
    site = install_apart(requirement, kept)
    return CudaProvider(site, fake_cuda, compiled_once("emulator.so", compile_emulator))


@pytest.fixture(scope="session")
def plugin_shells() -> StandIn:
    """TensorRT's plugins with their kernels, for the CPU."""
    return StandIn.load(compiled_with_gxx("shells.so", compile_shells))


CPU_AND = "backends=[onnxruntime-cpu, {kind: %s, compute_capabilities: [sm_90]}]"


@pytest.fixture(scope="session")
def cuda_plan(built: BuildOnce) -> Plan:
    """The toy's plan for the CPU and for ONNX Runtime on a GPU."""
    return open_plan(built("cuda-plan", [CPU_AND % "onnxruntime-cuda"]))


@pytest.fixture(scope="session")
def everything_cuda_plan(built: BuildOnce) -> Path:
    return built("everything-cuda-plan", [*EVERYTHING, CPU_AND % "onnxruntime-cuda"])


@pytest.fixture(scope="session")
def everything_kernel_plan(built: BuildOnce) -> Path:
    return built("everything-kernel-plan", [*EVERYTHING, CPU_AND % "cuda"])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Commands started here obey interrupts, even where the tests run in a shell's background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
