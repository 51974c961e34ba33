"""The plan for ONNX Runtime on a GPU: its engines compute the same tokens, here on the CPU.

Its graphs hold ONNX Runtime's ops only, which its CPU provider runs too. What needs a GPU is marked `gpu`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

import outrider.compiler.design
import outrider.compiler.lowering as lowering
from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import PlanError
from outrider.plans.plan import Plan
from outrider.plugins.cuda import LAUNCHES
from outrider.runtime.backends import BACKENDS
from outrider.runtime.backends.onnxruntime_cuda import DeviceEngine
from outrider.runtime.options.options import Options
from outrider.tools.verify.agreement import compare_drafters
from tests.compiler.grouped_attention import in_float32, norms_outside
from tests.conftest import TOY_DRAFTERS
from tests.cpu_session import cpu_session

pytest.importorskip("cuda.core")

CUDA = "onnxruntime-cuda"


def test_the_plan_has_our_ops_for_every_architecture(cuda_plan: Plan) -> None:
    target = cuda_plan.manifest.backends[CUDA]
    assert set(target.kernels) == {"sm_90"}
    listed = {file.path for file in cuda_plan.manifest.files}
    for file in target.kernels.values():
        assert file in listed
        cubin = cuda_plan.file(file).read_bytes()
        assert all(launch.kernel.encode() in cubin for launch in LAUNCHES.values())
    assert cuda_plan.manifest.backends["onnxruntime-cpu"].kernels == {}


def test_engines_hold_ops_of_onnx_runtime_and_functions_alone(cuda_plan: Plan) -> None:
    for engine in cuda_plan.manifest.backends[CUDA].engines.values():
        model = onnx.load(cuda_plan.file(engine.file), load_external_data=False)
        functions = {(function.domain, function.name) for function in model.functions}
        own = {"", "com.microsoft"}
        assert {(node.domain, node.op_type) for node in model.graph.node if node.domain not in own} <= functions
        assert "GroupQueryAttention" not in {node.op_type for node in model.graph.node}, "not in float32"


def test_every_drafter_gives_the_tokens_of_plain_decoding(cuda_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """And plain decoding those of the CPU's engines: near ties allowed, since other kernels compute other bits."""
    monkeypatch.setitem(BACKENDS, CUDA, BACKENDS["onnxruntime-cpu"])
    runtime, reference = (Runtime.load(cuda_plan.root, backend=target) for target in (CUDA, "onnxruntime-cpu"))
    prompt = [(37 * i) % 299 + 1 for i in range(40)]
    for options in (Options(temperature=0.0), Options(temperature=0.8, seed=4)):
        options |= Options(max_new_tokens=60, ignore_eos=True)
        expected = reference.generate(prompt, drafter="none", **options).token_ids
        assert runtime.generate(prompt, drafter="none", **options).token_ids == expected
        checks = compare_drafters(runtime.session(), [prompt], TOY_DRAFTERS, options, tolerance=1e-4, exact=False)
        assert {name: check.partings for name, check in checks.items()} == {name: [] for name in TOY_DRAFTERS}


@pytest.fixture
def _grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of float32 with GroupQueryAttention, run on the CPU."""
    in_float32(monkeypatch)
    norms_outside(monkeypatch)
    monkeypatch.setitem(BACKENDS, CUDA, BACKENDS["onnxruntime-cpu"])


def build_grouped(toy_recipe: Path, out: Path, capacity: str) -> Runtime:
    targets = f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_80]}}]"
    built = build(load_recipe(toy_recipe, [targets, f"capacity={capacity}"]), toy_recipe, out)
    reports = built.plan.manifest.backends[CUDA].lowering
    applied = {report.engine: report.applied for report in reports if report.rule == "GroupQueryAttention"}
    assert applied.keys() == {"target", "chain", "sure", "bushy", "head", "block"}
    assert all(applied.values())
    return Runtime.load(built.plan.root)


@pytest.mark.usefixtures("_grouped")
def test_with_grouped_attention_every_drafter_gives_the_tokens_of_plain_decoding(
    toy_recipe: Path, toy: Runtime, tmp_path: Path
) -> None:
    """Prefill in chunks after a prefix, chains, trees, draft levels and a second turn over one KV cache."""
    runtime = build_grouped(toy_recipe, tmp_path / "plan", "{context: 160, prefill_chunk: 16}")
    prompt = [(37 * i) % 299 + 1 for i in range(40)]
    for options in (Options(temperature=0.0), Options(temperature=0.8, seed=4)):
        options |= Options(max_new_tokens=60, ignore_eos=True, auto_disable=False)
        expected = toy.generate(prompt, drafter="none", **options).token_ids
        assert runtime.generate(prompt, drafter="none", **options).token_ids == expected
        checks = compare_drafters(runtime.session(), [prompt], TOY_DRAFTERS, options, tolerance=1e-4, exact=False)
        assert {name: check.partings for name, check in checks.items()} == {name: [] for name in TOY_DRAFTERS}
        session = runtime.session()
        session.generate(prompt, drafter="bushy", **options)
        again = toy.generate([*prompt, *expected, 5, 6], drafter="none", **options).token_ids
        assert session.generate([5, 6], drafter="head", **options).token_ids == again


@pytest.mark.usefixtures("_grouped")
def test_with_grouped_attention_branches_of_one_row_have_the_tokens_that_they_have_alone(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees grow from several tips in one pass; each branch sees its own slots among the others'. (No plan for CUDA
    serves branches yet: their programs are there, and run here.)"""
    monkeypatch.setattr(outrider.compiler.design, "_check_served", lambda recipe: None)
    runtime = build_grouped(toy_recipe, tmp_path / "plan", "{context: 160, prefill_chunk: 16, branches: 4}")
    prefix = [(37 * i) % 299 + 1 for i in range(30)]
    for drafter in ("none", "chain", "bushy", "head"):
        options = Options(max_new_tokens=20, ignore_eos=True, auto_disable=False, temperature=0.7, seed=2)
        prompts = [[5 + i] * (1 + 3 * i) for i in range(4)]
        branches = [{"prompt": prompt, "drafter": drafter, **options} for prompt in prompts]
        found = runtime.generate_branches(prefix, branches, mode="in-one-sequence")
        for place, (prompt, generation) in enumerate(zip(prompts, found, strict=True)):
            alone = runtime.generate([*prefix, *prompt], drafter=drafter, stream_id=place, **options)
            assert generation.token_ids == alone.token_ids


def test_a_second_build_keeps_kernels_and_engines(cuda_plan: Plan, toy_recipe: Path, tmp_path: Path) -> None:
    place = shutil.copytree(cuda_plan.root, tmp_path / "plan")
    again = load_recipe(toy_recipe, [f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_90]}}]"])
    built = build(again, toy_recipe, place)
    assert built.reused == (CUDA,)
    target = built.plan.manifest.backends[CUDA]
    assert set(target.kernels) == {"sm_90"}
    assert built.plan.file(target.kernels["sm_90"]).stat().st_size > 0


def test_an_engine_that_reads_tensors_elsewhere_is_refused(cuda_plan: Plan) -> None:
    """Here on the CPU, where all of its tensors are."""
    engine = cuda_plan.manifest.backends[CUDA].engines["chain"]
    session = cpu_session(cuda_plan.file(engine.file))
    DeviceEngine(session, engine, ("cpu", 0))
    with pytest.raises(PlanError, match=r"chain.*past_length.*elsewhere than on the device.*build the plan again"):
        DeviceEngine(session, engine, ("cuda", 0))


def test_levels_that_leave_no_rows_behind_give_the_same_tokens(
    toy_recipe: Path, toy: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorRT has them: a drafter feeds again what was accepted."""
    monkeypatch.setitem(lowering.RULES, CUDA, lowering.RULES["tensorrt-rtx"])
    monkeypatch.setitem(BACKENDS, CUDA, BACKENDS["onnxruntime-cpu"])
    targets = f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_80]}}]"
    runtime = Runtime.load(build(load_recipe(toy_recipe, [targets]), toy_recipe, tmp_path / "plan").plan.root)
    prompt = [(37 * i) % 299 + 1 for i in range(40)]
    for options in (Options(temperature=0.0), Options(temperature=0.8, seed=4)):
        options |= Options(max_new_tokens=60, ignore_eos=True, auto_disable=False)
        expected = toy.generate(prompt, drafter="none", **options).token_ids
        for drafter in ("chain", "sure", "bushy", "head"):
            session = runtime.session()
            found = session.generate(prompt, drafter=drafter, **options)
            assert found.token_ids == expected
            rest = session.generate([5, 6], drafter=drafter, **options).token_ids
            whole = toy.generate([*prompt, *expected, 5, 6], drafter="none", **options).token_ids
            assert rest == whole
            if drafter in ("chain", "bushy"):  # as many drafts are accepted as where the rows stay
                assert found.stats.accepted == toy.generate(prompt, drafter=drafter, **options).stats.accepted
