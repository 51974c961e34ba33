"""The backend `onnxruntime-cuda`: its engines, run on the CPU, compute the same tokens; and sessions on an emulated
device, with real engines and the real kernels. `test_gpu.py` needs a GPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import pytest

from outrider import Generation, Runtime
from outrider.compiler.backends import BACKEND_CLASSES
from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.manifest import BackendPlan
from outrider.plans.plan import Plan, open_plan
from outrider.runtime.backends import DRIVERS, choose_backend, cuda_driver, onnxruntime_cuda
from outrider.runtime.backends.base import Driver
from outrider.runtime.backends.cuda_driver import fitting_kernels, kernels_reason
from outrider.runtime.backends.device_layout import LARGE, lay_out
from outrider.runtime.backends.onnxruntime_cuda import DeviceEngine
from outrider.runtime.options.options import Options
from outrider.runtime.step_loop import StepLoop
from outrider.tools.verify.agreement import compare_drafters
from tests.compiler.steps import in_float32, norms_outside
from tests.conftest import TOY_DRAFTERS, BuildOnce
from tests.cpu_session import cpu_session
from tests.integration.shifting_rule import Shifting
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice

pytest.importorskip("cuda.core")

CUDA = "onnxruntime-cuda"


def test_engines_hold_ops_of_onnx_runtime_and_functions_alone(cuda_plan: Plan) -> None:
    for engine in cuda_plan.manifest.backends[CUDA].engines.values():
        model = onnx.load(cuda_plan.file(engine.file), load_external_data=False)
        functions = {(function.domain, function.name) for function in model.functions}
        own = {"", "com.microsoft"}
        assert {(node.domain, node.op_type) for node in model.graph.node if node.domain not in own} <= functions
        assert "GroupQueryAttention" not in {node.op_type for node in model.graph.node}, "not in float32"


PROMPT = [(37 * i) % 299 + 1 for i in range(40)]
SHORT = PROMPT[:20]
LONG = Options(max_new_tokens=60, ignore_eos=True)
SAMPLINGS = (LONG | Options(temperature=0.0), LONG | Options(temperature=0.8, seed=4))


def expect_no_partings(runtime: Runtime, reference: Runtime, options: Options) -> list[int]:
    """Plain decoding gives the reference's tokens, and so does every drafter, but for near ties: other kernels compute
    other bits."""
    expected = reference.generate(PROMPT, drafter="none", **options).token_ids
    assert runtime.generate(PROMPT, drafter="none", **options).token_ids == expected
    checks = compare_drafters(runtime.session(), [PROMPT], TOY_DRAFTERS, options, tolerance=1e-4, exact=False)
    assert {name: check.partings for name, check in checks.items()} == {name: [] for name in TOY_DRAFTERS}
    return expected


def test_every_drafter_gives_the_tokens_of_plain_decoding(cuda_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRIVERS, CUDA, DRIVERS["onnxruntime-cpu"])
    runtime, reference = (Runtime.load(cuda_plan.root, backend=target) for target in (CUDA, "onnxruntime-cpu"))
    for options in SAMPLINGS:
        expect_no_partings(runtime, reference, options)


@pytest.fixture
def _grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of float32 with GroupQueryAttention, run on the CPU."""
    in_float32(monkeypatch)
    norms_outside(monkeypatch)
    monkeypatch.setitem(DRIVERS, CUDA, DRIVERS["onnxruntime-cpu"])


@pytest.mark.usefixtures("_grouped")
def test_with_grouped_attention_every_drafter_gives_the_tokens_of_plain_decoding(
    built: BuildOnce, toy: Runtime
) -> None:
    """Prefill in chunks after a prefix, chains, trees, draft levels and a second turn over one KV cache."""
    plan = open_plan(built("grouped", [f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_80]}}]"]))
    reports = plan.manifest.backends[CUDA].lowering
    applied = {report.engine: report.applied for report in reports if report.rule == "GroupQueryAttention"}
    assert applied.keys() == {"target", "chain", "bushy", "head", "block"}
    assert all(applied.values())
    runtime = Runtime.load(plan.root)
    for sampling in SAMPLINGS:
        options = sampling | Options(auto_disable=False)
        expected = expect_no_partings(runtime, toy, options)
        session = runtime.session()
        session.generate(PROMPT, drafter="bushy", **options)
        again = toy.generate([*PROMPT, *expected, 5, 6], drafter="none", **options).token_ids
        assert session.generate([5, 6], drafter="head", **options).token_ids == again


def test_an_engine_that_reads_tensors_elsewhere_is_refused(cuda_plan: Plan) -> None:
    """Here on the CPU, where all of its tensors are."""
    engine = cuda_plan.manifest.backends[CUDA].engines["chain"]
    session = cpu_session(cuda_plan.file(engine.file))
    DeviceEngine(session, engine, ("cpu", 0))
    with pytest.raises(PlanError, match=r"chain.*past_length.*elsewhere than on the device.*build the plan again"):
        DeviceEngine(session, engine, ("cuda", 0))


def test_levels_that_leave_no_rows_give_the_same_tokens(
    built: BuildOnce, toy: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorRT has them: a drafter feeds again what was accepted, and its drafts are as good."""
    monkeypatch.setattr(BACKEND_CLASSES[CUDA], "rules", BACKEND_CLASSES["tensorrt-rtx"].rules)
    monkeypatch.setitem(DRIVERS, CUDA, DRIVERS["onnxruntime-cpu"])
    runtime = Runtime.load(built("no-rows", [f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_80]}}]"]))
    for options in SAMPLINGS:
        expected = toy.generate(PROMPT, drafter="none", **options).token_ids
        whole = toy.generate([*PROMPT, *expected, 5, 6], drafter="none", **options).token_ids
        for drafter in ("chain", "bushy", "head"):
            session, always = runtime.session(), options | Options(auto_disable=False, drafter=drafter)
            found = session.generate(PROMPT, **always)
            assert (found.token_ids, session.generate([5, 6], **always).token_ids) == (expected, whole)
            assert drafter == "head" or found.stats.accepted == toy.generate(PROMPT, **always).stats.accepted


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


@pytest.fixture
def runtime(cuda_plan: Plan, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return loaded(cuda_plan, EmulatedBackend(device), monkeypatch)


def loaded(plan: Plan, backend: EmulatedBackend, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setitem(DRIVERS, CUDA, Driver(lambda target: None, lambda target, settings: backend))
    return Runtime.load(plan.root)


def test_it_is_preferred_where_it_can_run(runtime: Runtime) -> None:
    assert (runtime.backend, runtime.passed_over) == (CUDA, {})


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
def test_tokens_are_those_of_the_cpu(runtime: Runtime, toy: Runtime, drafter: str) -> None:
    options = Options(temperature=0.9, top_k=40, top_p=0.95, seed=5, max_new_tokens=14, ignore_eos=True)
    options |= Options(auto_disable=False)
    expected = toy.generate(SHORT, drafter="none", **options)
    found = runtime.generate(SHORT, drafter=drafter, **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.drafted > 0 or drafter in ("none", "ngram", "short")  # counts may have nothing to say


@pytest.mark.parametrize("place", range(1, 6, 2))
def test_a_session_continues_where_a_pass_was_interrupted(
    runtime: Runtime, toy: Runtime, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Changes of slot tables that were not put in their places come with the next upload."""
    prompt, options = SHORT * 3, Options(ignore_eos=True, drafter="none")
    expected = toy.generate(prompt, max_new_tokens=10, **options).token_ids
    launch, launched = device.launch, 0

    def interrupted(kernel: str, *rest: Any) -> None:
        nonlocal launched
        launched += kernel == "outrider_set_numbers"
        if kernel == "outrider_set_numbers" and launched == place:
            raise KeyboardInterrupt
        launch(kernel, *rest)

    session = runtime.session()
    with monkeypatch.context() as patch:
        patch.setattr(device, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(prompt, max_new_tokens=10, **options)
    had = len(session.token_ids)
    written = max(0, had - len(prompt))
    found = session.generate([] if had else prompt, max_new_tokens=10 - written, **options)
    assert found.token_ids == expected[written:]


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
def test_rules(runtime: Runtime, toy: Runtime, drafter: str) -> None:
    """The host changes rows of logits that lie on the device, before the ops there choose from them."""
    for temperature in (0.0, 1.0):
        options = Options(
            constraint=Shifting(), temperature=temperature, seed=5, max_new_tokens=14, ignore_eos=True, logprobs=1
        )
        expected = toy.generate(SHORT, drafter="none", **options)
        found = runtime.generate(SHORT, drafter=drafter, auto_disable=False, **options)
        assert found.token_ids == expected.token_ids
        assert [entry.top[0][0] for entry in found.logprobs] == [entry.top[0][0] for entry in expected.logprobs]
        assert found.stats.drafted > 0 or drafter in ("none", "ngram", "short")


def test_turns_of_several_threads_logprobs_and_beams(runtime: Runtime, toy: Runtime) -> None:
    options = Options(max_new_tokens=8, ignore_eos=True, drafter="bushy", logprobs=3)
    ours, theirs = runtime.session(), toy.session()
    for prompt in (SHORT, [5, 6], []):
        found = list[Generation]()
        thread = threading.Thread(target=lambda p=prompt, to=found: to.append(ours.generate(p, **options)))
        thread.start()
        thread.join()
        (mine,), other = found, theirs.generate(prompt, **options)
        assert mine.token_ids == other.token_ids
        np.testing.assert_allclose(
            [entry.logprob for entry in mine.logprobs], [entry.logprob for entry in other.logprobs], atol=1e-4
        )
    mine, other = (r.beam_search(SHORT, beams=3, max_new_tokens=6) for r in (runtime, toy))
    assert [beam.token_ids for beam in mine] == [beam.token_ids for beam in other]


def test_a_step_launches_one_kernel_an_op_and_copies_the_small_block_alone(
    runtime: Runtime, device: EmulatedDevice
) -> None:
    stream = runtime.session().stream(SHORT, max_new_tokens=12, drafter="head", ignore_eos=True, auto_disable=False)
    for _ in range(3):
        next(stream)
    device.launched.clear()
    device.copied.clear()
    next(stream)
    assert device.launched == {
        "outrider_race_noise": 1, "outrider_bim_mask": 2, "outrider_tree_accept": 1, "outrider_kv_gather": 1,
        "outrider_set_numbers": 1,
    }  # fmt: skip
    layout = lay_out(runtime.loaded.plan)
    sent, fetched = (part.stop - part.start for part in (layout.sent, layout.fetched))
    assert device.copied == {"up": sent, "down": fetched}
    assert fetched < sent < layout.size
    assert {name.rpartition(".")[2] for name in layout.offsets}.isdisjoint(LARGE)  # which stay on the device
    stream.close()


def test_kv_that_is_not_finite_is_computed_again(runtime: Runtime) -> None:
    session, other = runtime.session(), runtime.session()
    for each in (session, other):
        each.generate(SHORT, max_new_tokens=3, drafter="none", ignore_eos=True)
    expected = other.generate(max_new_tokens=3, drafter="none").token_ids
    kv = session.buffers.memory[names.buffer_name(names.TARGET, names.KV)]
    nan = np.full(int(np.prod(kv.shape)), np.nan, np.float32)
    with session.buffers.device.lock():
        session.buffers.device.to_device(kv.address, nan.ctypes.data, nan.nbytes)
    assert session.generate(max_new_tokens=3, drafter="none").token_ids == expected


def test_a_binding_that_onnxruntime_refuses_is_an_error_of_ours(runtime: Runtime, cuda_plan: Plan) -> None:
    engine = cuda_plan.manifest.backends[CUDA].engines["chain"]
    buffers = StepLoop(runtime.loaded).buffers
    unknown = engine.inputs[0].model_copy(update={"name": "unknown"})
    bound = {t.name: names.buffer_name("chain", names.TOKEN_IDS) for t in (*engine.inputs, *engine.outputs, unknown)}
    device_engine = onnxruntime_cuda.DeviceEngine(
        cpu_session(cuda_plan.file(engine.file)), engine.model_copy(update={"inputs": (unknown,)}), ("cpu", 0)
    )
    with pytest.raises(PlanError, match=r"chain.onnx failed on the GPU: .*unknown"):
        device_engine.bind(buffers, bound)([1] * len(names.SYMBOLS))


def test_without_a_gpu_the_reason_is_given(cuda_plan: Plan) -> None:
    targets = cuda_plan.manifest.backends
    reason = onnxruntime_cuda.reason_against(targets[CUDA])
    assert reason is not None
    chosen = choose_backend(targets, None)
    assert (chosen.backend, chosen.passed_over) == ("onnxruntime-cpu", {CUDA: reason})
    with pytest.raises(PlanError, match="cannot run here"):
        choose_backend(targets, CUDA)


@pytest.mark.parametrize(
    ("own", "available", "fitting"),
    [
        ("sm_90", ["sm_80", "sm_90"], "sm_90"),
        ("sm_89", ["sm_80", "sm_86", "sm_90"], "sm_86"),
        ("sm_120", ["sm_80", "sm_120"], "sm_120"),
        ("sm_121", ["sm_120"], "sm_120"),
        ("sm_80", ["sm_86"], None),
        ("sm_75", ["sm_80"], None),
        ("sm_100", ["sm_90"], None),
    ],
)
def test_kernels_that_run_on_a_device(own: str, available: list[str], fitting: str | None) -> None:
    assert fitting_kernels(own, available) == fitting


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("sm_75", "the GPU is sm_75, and this backend needs compute capability 8.0 or later"),
        ("sm_90", "our kernels were compiled for sm_80; add sm_90 to compute_capabilities of the backend"),
        ("sm_86", "None"),
    ],
)
def test_a_gpu_without_kernels_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, own: str, said: str) -> None:
    monkeypatch.setattr(cuda_driver, "architecture", lambda: own)
    plan = BackendPlan.model_construct(kernels={"sm_80": "kernels.cubin"})
    assert said in str(kernels_reason(plan, 80))
