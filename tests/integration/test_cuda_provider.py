"""Sessions on ONNX Runtime's real CUDA provider, over CUDA's libraries for a machine without a GPU (`tests/fake_cuda`).

Where nodes are placed, what is copied, waited for and captured is ONNX Runtime's own doing; its kernels do nothing, so
that logits are zero and drafts are token 0.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from outrider.plans.plan import Plan
from tests.conftest import EVERYTHING, TOY_DRAFTERS, BuildOnce
from tests.fake_cuda import DRIVER, LIBRARIES, Recorded
from tests.fake_cuda.provider import CudaProvider, Ended
from tests.integration.test_onnxruntime_cuda import CUDA

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.cuda_provider

SESSIONS = """
import json, sys
from outrider import Runtime
root, graphs, *drafters = sys.argv[1:]
runtime = Runtime.load(root, backend="onnxruntime-cuda", cuda_graphs=graphs == "True")
options = dict(max_new_tokens=24, ignore_eos=True, auto_disable=False, temperature=1.0, seed=3)
found = {}
for drafter in drafters:
    session = runtime.session()
    turns = [session.generate(prompt, drafter=drafter, **options) for prompt in ([5, 6, 7], [8] * 40)]
    found[drafter] = [turn.token_ids for turn in turns], sum(turn.stats.drafted for turn in turns)
print(json.dumps({"backend": runtime.backend, "found": found}))
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="graphs"), pytest.param(False, id="kernel by kernel", marks=pytest.mark.long)],
)
def recorded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def ended(
    recorded: bool, cuda_provider: CudaProvider, cuda_plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> Ended:
    """Sessions of every drafter, of two turns each."""
    folder = tmp_path_factory.mktemp("sessions")
    return cuda_provider.run(SESSIONS, cuda_plan.root, recorded, "none", *TOY_DRAFTERS, folder=folder)


def test_no_call_is_unsafe_and_no_replay_waits(ended: Ended, recorded: bool) -> None:
    """No allocation and no wait while a stream captures, no work in the legacy stream then, no copy between other kinds
    of memory than its call says or past their ends, no captured copy of memory that may move."""
    assert ended.events("fault") == []
    captures, replays = ([each for each in ended.record if each.event == event] for event in ("capture", "replay"))
    if not recorded:
        assert captures == replays == []
        return
    assert "without CUDA graphs" not in ended.log
    for call in ("cuStreamBeginCapture", "cudaStreamBeginCapture"):
        assert any(each.text.startswith(f"{call} ") for each in captures)
    by_engines = [each for each in replays if each.text.startswith("cudaGraphLaunch ")]
    assert len(by_engines) > len(captures)
    assert len({each.thread for each in by_engines}) == 1
    following = {after.event for replay, after in pairwise(ended.record) if replay in by_engines}
    assert "wait" not in following  # the host continues to the next stretch of the round


def test_our_kernels_choose_the_same_tokens_with_any_drafter(ended: Ended) -> None:
    """What they draw from logits of zero depends on noise alone, but for trees that engines left in place."""
    assert ended.answer["backend"] == CUDA
    found = {drafter: tokens for drafter, (tokens, _) in ended.answer["found"].items()}
    assert all(found[drafter] == found["none"] for drafter in ("ngram", "short"))
    assert len(set(found["none"][0])) > 10
    assert all(ended.answer["found"][drafter][1] > 0 for drafter in ("chain", "bushy", "head"))
    launched = set(ended.events("kernel"))
    assert {"outrider_race_noise", "outrider_bim_mask", "outrider_tree_accept", "outrider_kv_gather"} <= launched


PLACEMENT = """
import json, sys
from outrider import Runtime
runtime = Runtime.load(sys.argv[1], backend="onnxruntime-cuda")
def placed(session):
    tensors = (*session.get_inputs(), *session.get_outputs())
    infos = (*session.get_input_memory_infos(), *session.get_output_memory_infos())
    return {tensor.name: info.name for tensor, info in zip(tensors, infos, strict=True)}
print(json.dumps({name: placed(engine._session) for name, engine in runtime.loaded.engines.items()}))
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_engines_read_and_write_the_tensors_on_the_device(
    dtype: str, cuda_provider: CudaProvider, cuda_plan: Plan, half: Path, tmp_path: Path
) -> None:
    """An input that ONNX Runtime reads on the CPU is copied when it is bound: later runs see its old value."""
    found = cuda_provider.run(PLACEMENT, half if dtype == "float16" else cuda_plan.root, folder=tmp_path).answer
    of_float32 = {"target", "chain", "bushy", "head", "block"}
    assert set(found) == ({"target", "bushy"} if dtype == "float16" else of_float32)
    elsewhere = {name: [t for t, place in tensors.items() if place != "Cuda"] for name, tensors in found.items()}
    assert not any(elsewhere.values()), elsewhere


TOGETHER = """
import json, sys
from outrider import PrefixCacheConfig, Runtime
runtime = Runtime.load(
    sys.argv[1], backend="onnxruntime-cuda", cuda_graphs=sys.argv[2] == "True",
    prefix_cache=PrefixCacheConfig(max_cached_tokens=512),
)
options = dict(max_new_tokens=16, ignore_eos=True, auto_disable=False, temperature=1.0, seed=3)
drafters = ["none", "ngram", "none", "ngram"]
branches = [{"prompt": [7 + place], "drafter": drafter, **options} for place, drafter in enumerate(drafters)]
found = {}
for mode in ("in-one-sequence", "batching"):
    found[mode] = [each.token_ids for each in runtime.generate_branches([5] * 40, branches, mode=mode)]
asked = [([5] * 40 + [7 + place], {"drafter": drafter, **options}) for place, drafter in enumerate(drafters)]
for turn in ("cold", "warm"):
    answers = [handle.result() for handle in runtime.submit_all(asked)]
    found[turn] = [each.token_ids for each in answers]
alone = runtime.generate([5] * 40 + [7], partial_kv="lossy", drafter="ngram", **options)
found["partial"] = [alone.token_ids]
reused = [each.stats.reused_tokens for each in answers]
print(json.dumps({"found": found, "reused": reused, "partial": alone.stats.partial_rounds}))
runtime.close()
"""


ROWS = ["capacity.branches=4", "drafters=[{name: ngram, kind: ngram, max_draft: 8}]"]
HALF = f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_90], dtype: float16}}]"


@pytest.mark.parametrize(
    ("graphs", "dtype"),
    [(False, "float16"), *(pytest.param(on, "float32", marks=pytest.mark.long) for on in (True, False))],
)
def test_many_sequences_the_prefix_cache_and_partial_kv(
    graphs: bool, dtype: str, cuda_provider: CudaProvider, built: BuildOnce, tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Tokens are drawn from logits of zero by seed, place and sequence alone. (Model drafters, which several sequences
    read on the host, draft garbage here.) Several rows are beyond GroupQueryAttention: each layer is standard ops
    there, in float16 too."""
    half = dtype == "float16"
    plan = built("half-rows", [*EVERYTHING, *ROWS, HALF]) if half else request.getfixturevalue("everything_cuda_plan")
    ended = cuda_provider.run(TOGETHER, plan, graphs, folder=tmp_path)
    assert ended.events("fault") == []
    found = ended.answer["found"]
    assert found["in-one-sequence"] == found["batching"]
    assert found["cold"] == found["warm"]
    assert found["partial"][0] == found["cold"][0]
    assert ended.answer["partial"] > 0
    assert all(reused >= 40 for reused in ended.answer["reused"])
    assert "outrider_kv_gather" in ended.events("kernel")


@pytest.fixture(scope="module")
def half(built: BuildOnce) -> Path:
    """A plan in float16, for which the CUDA provider has GroupQueryAttention."""
    tree = "{name: bushy, kind: model, checkpoint: drafter, tree: {top_k: 3, depth: 1, nodes: 9}}"
    return built("half-plan", [HALF, f"drafters=[{tree}]"])


LAYERS = 3  # of the toy's target; its drafter has one
ATTENTION = Counter(  # a layer's kernels in GroupQueryAttention, by a part of their names
    {
        "GetSequenceLengths": 1,
        "UnpackRoPEAppend": 1,  # norms, rotates, and writes the new keys and values into the KV cache
        "TransposeQKV": 1,
        "cublasGemmStridedBatchedEx": 2,
        "UnfusedSoftmaxKernel": 1,
        "TransposeCtx": 1,
    }
)


def test_a_layer_in_float16_is_sixteen_kernels_seven_of_them_attention(
    cuda_provider: CudaProvider, half: Path, tmp_path: Path
) -> None:
    """Nothing is copied but numbers of the pass: keys and values stay where they are, and none is repeated."""
    ended = cuda_provider.run(SESSIONS, half, True, "none", "bushy", folder=tmp_path)
    assert ended.events("fault") == []
    assert "without CUDA graphs" not in ended.log
    passes = Counter[int]()
    for graph in captures(ended.record):
        kernels = [each.text for each in graph if each.event == "captured kernel"]
        layers = count("UnfusedSoftmaxKernel", kernels)
        passes[layers] += 1
        for name, each in ATTENTION.items():
            assert count(name, kernels) == each * layers
        if layers == LAYERS:
            outside = 12  # embedding, first norm, last sum and norm, logits; the bias and the last slot
            assert len(kernels) <= 16 * LAYERS + outside
            copied = [int(each.text.split()[3]) for each in graph if each.event == "captured copy"]
            assert sum(copied) <= 8
    assert passes.keys() == {0, 2, LAYERS}  # our ops, the drafter with a level, the target


def captures(record: list[Recorded]) -> list[list[Recorded]]:
    """The calls of each capture, on one thread at a time."""
    found, open_on = list[list[Recorded]](), dict[int, list[Recorded]]()
    for each in record:
        if each.event == "capture":
            open_on[each.thread] = []
        elif each.event == "captured":
            found.append(open_on.pop(each.thread))
        elif each.thread in open_on and each.event.startswith("captured "):
            open_on[each.thread].append(each)
    return found


def count(part: str, kernels: list[str]) -> int:
    return sum(part in kernel for kernel in kernels)


NEEDED = [name for name in LIBRARIES if name != DRIVER]
WITHOUT = """
import json, sys
from outrider import PlanError, Runtime
from outrider.runtime.backends import onnxruntime_cuda
if sys.argv[2] == "unnoticed":
    onnxruntime_cuda._missing_libraries = list
try:
    Runtime.load(sys.argv[1], backend="onnxruntime-cuda")
except PlanError as error:
    best = None if sys.argv[2] == "unnoticed" else Runtime.load(sys.argv[1])
    print(json.dumps([str(error), best and best.backend, best and best.passed_over]))
"""


@pytest.mark.parametrize(
    "library", [name if "curand" in name else pytest.param(name, marks=pytest.mark.long) for name in NEEDED]
)
def test_a_missing_library_is_named_and_the_cpu_is_taken(
    library: str, cuda_provider: CudaProvider, cuda_plan: Plan, tmp_path: Path
) -> None:
    ended = cuda_provider.run(WITHOUT, cuda_plan.root, "noticed", folder=tmp_path, without=library)
    said, best, passed_over = ended.answer
    assert f"needs {library}, which cannot be loaded; in a new environment, run `pip install" in said
    assert best == "onnxruntime-cpu"
    assert library in passed_over[CUDA]


def test_a_session_that_fell_back_to_the_cpu_is_refused(
    cuda_provider: CudaProvider, cuda_plan: Plan, tmp_path: Path
) -> None:
    ended = cuda_provider.run(WITHOUT, cuda_plan.root, "unnoticed", folder=tmp_path, without="libcublas.so.13")
    assert "has left its CUDAExecutionProvider out of the session" in ended.answer[0]


STREAM_RULES = """
import ctypes, json
cuda, cudart = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libcudart.so.13")
stream, graph, address, pinned = (ctypes.c_void_p() for _ in range(4))
assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64)) == 0
assert cuda.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(64), 0) == 0
pageable, eight = ctypes.create_string_buffer(64), ctypes.c_size_t(8)
cuda.cuMemcpyHtoDAsync_v2(address, pageable, eight, stream)
cuda.cuMemcpyHtoDAsync_v2(address, pinned, ctypes.c_size_t(65), stream)
cuda.cuStreamBeginCapture_v2(stream, 0)
codes = [
    cudart.cudaMalloc(ctypes.byref(graph), eight),
    cudart.cudaStreamSynchronize(stream),
    cudart.cudaMemcpy(address, pageable, eight, 1),
    cudart.cudaMemcpyAsync(address, pageable, eight, 1, stream),
]
cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
print(json.dumps(codes))
"""


def test_the_libraries_find_what_they_are_there_to_find(fake_cuda: Path, tmp_path: Path) -> None:
    ended = CudaProvider(tmp_path, fake_cuda, tmp_path).run(STREAM_RULES, folder=tmp_path)
    assert ended.answer == [900, 900, 900, 0]
    assert ended.events("fault") == [
        "cuMemcpyHtoDAsync between other kinds of memory than it says",
        "cuMemcpyHtoDAsync goes past the end of an allocation",
        "cuMemcpyHtoDAsync goes past the end of an allocation",
        "cudaMalloc is unsafe while stream 1 captures",
        "cudaStreamSynchronize of a stream that captures",
        "cudaMemcpy while a stream captures",
        "cudaMemcpyAsync of pageable memory is captured: a replay goes to the same address",
    ]
