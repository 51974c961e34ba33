"""The plan for ONNX Runtime on a GPU: its engines compute the same tokens, here on the CPU.

Its graphs hold standard ops only, which any provider runs. What needs a GPU is marked `gpu`.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from compiler.agreement import compare_drafters
from compiler.build import build
from compiler.recipe import load_recipe
from plans.errors import PlanError
from plans.plan import Plan
from plugins.cuda import LAUNCHES
from runtime import Runtime
from runtime.backends import BACKENDS
from runtime.request import Options
from tests.conftest import TOY_DRAFTERS

pytest.importorskip("cuda.core")

CUDA = "onnxruntime-cuda"


@pytest.fixture(scope="module")
def plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    out = tmp_path_factory.mktemp("cuda") / "plan"
    targets = f"targets=[onnxruntime-cpu, {{kind: {CUDA}, compute_capabilities: [sm_80, sm_90]}}]"
    return build(load_recipe(toy_recipe, [targets]), toy_recipe, out).plan


def test_the_plan_has_our_ops_for_every_architecture(plan: Plan) -> None:
    target = plan.manifest.targets[CUDA]
    assert set(target.kernels) == {"sm_80", "sm_90"}
    listed = {file.path for file in plan.manifest.files}
    for file in target.kernels.values():
        assert file in listed
        cubin = plan.file(file).read_bytes()
        assert all(launch.kernel.encode() in cubin for launch in LAUNCHES.values())
    assert plan.manifest.targets["onnxruntime-cpu"].kernels == {}


def test_engines_hold_standard_ops_and_functions_alone(plan: Plan) -> None:
    for engine in plan.manifest.targets[CUDA].engines.values():
        model = onnx.load(plan.file(engine.file), load_external_data=False)
        functions = {(function.domain, function.name) for function in model.functions}
        assert {(node.domain, node.op_type) for node in model.graph.node if node.domain} <= functions
        assert "GroupQueryAttention" not in {node.op_type for node in model.graph.node}


def test_every_drafter_gives_the_tokens_of_plain_decoding(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """And plain decoding those of the CPU's engines: chains near ties too, since no dummy row keeps their bits."""
    monkeypatch.setitem(BACKENDS, CUDA, BACKENDS["onnxruntime-cpu"])
    runtime, reference = (Runtime.load(plan.root, target=target) for target in (CUDA, "onnxruntime-cpu"))
    prompt = [(37 * i) % 299 + 1 for i in range(40)]
    for options in (Options(temperature=0.0), Options(temperature=0.8, seed=4)):
        options |= Options(max_new_tokens=60, ignore_eos=True)
        expected = reference.generate(prompt, drafter="none", **options).token_ids
        assert runtime.generate(prompt, drafter="none", **options).token_ids == expected
        checks = compare_drafters(runtime.session(), [prompt], TOY_DRAFTERS, options, tolerance=1e-4)
        assert {name: check.partings for name, check in checks.items()} == {name: [] for name in TOY_DRAFTERS}


def test_a_second_build_keeps_kernels_and_engines(plan: Plan, toy_recipe: Path) -> None:
    again = load_recipe(toy_recipe, [f"targets=[{{kind: {CUDA}, compute_capabilities: [sm_80, sm_90]}}]"])
    built = build(again, toy_recipe, plan.root)
    assert built.reused == (CUDA,)
    assert set(built.plan.manifest.targets[CUDA].kernels) == {"sm_80", "sm_90"}
    assert built.plan.file(built.plan.manifest.targets[CUDA].kernels["sm_90"]).stat().st_size > 0


def test_a_runtime_that_cannot_drive_it_says_so(plan: Plan) -> None:
    with pytest.raises(PlanError, match=CUDA):
        Runtime.load(plan.root, target=CUDA)
