"""What TensorRT's runtime is asked for, and in which order; the library itself is recorded, never run."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.plans.buffers import DType, Tensor
from outrider.plans.errors import PlanError
from outrider.plans.manifest import Engine, Profile, Range
from outrider.runtime.backends.kept_kernels import KeptKernels
from outrider.runtime.backends.tensorrt_context import BoundEngine, ContextMaker

ENGINE = Engine(
    file="engines/tensorrt/target.engine",
    inputs=(
        Tensor(name="token_ids", dtype=DType.INT64, shape=("N",)),
        Tensor(name="past_length", dtype=DType.INT64, shape=(1,)),
    ),
    outputs=(Tensor(name="logits", dtype=DType.FLOAT32, shape=("M", 300)),),
    profiles=tuple(Profile(symbols={"N": Range(least=a, most=b)}) for a, b in ((1, 64), (65, 100))),
)
ONE, TREE, CHUNK = (
    [n, 128, m, 1, 2, n, 9, 1, 1] for n, m in ((1, 1), (9, 9), (80, 0))
)  # in the order of names.SYMBOLS


class Context:
    """Notes calls; those named in `refuses` return False."""

    def __init__(self, number: int, calls: list[tuple[Any, ...]], refuses: set[str]) -> None:
        self._number, self._calls, self._refuses = number, calls, refuses

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            self._calls.append((self._number, name, *arguments))
            return name not in self._refuses

        return call


class Library:
    """What makes contexts, and a session's buffers."""

    __name__ = "tensorrt_rtx"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: set[str] = set()
        self.made = 0
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")
        self.CudaGraphStrategy = SimpleNamespace(DISABLED="disabled")
        self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
        self.config = SimpleNamespace(
            set_execution_context_allocation_strategy=lambda value: None,
            create_runtime_cache=lambda: "cache",
            set_runtime_cache=lambda cache: cache == "cache",
        )
        self.saved = 0
        self.recording = False
        self.device = SimpleNamespace(stream_handle=7, mark=lambda: 1, wait_for=lambda mark: None)
        self.memory = {name: SimpleNamespace(address=at) for at, name in enumerate(("ids", "past", "logits"), 100)}

    def create_runtime_config(self) -> Any:
        return self.config

    def create_execution_context(self, config: Any) -> Context:
        assert config is self.config
        self.made += 1
        return Context(self.made, self.calls, self.refuses)

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return (1000, 5000)[profile]

    def workspace(self, name: str, size: int, zeroed: bool) -> int:
        assert (name, size, zeroed) == ("activations", 5000, False)
        return 4096

    def kernels(self, cache: Any) -> KeptKernels:
        assert cache == "cache"
        return self  # type: ignore[return-value]

    def save(self) -> None:
        self.saved += 1

    def said(self) -> str:
        return "what the library says"

    def bind(self, *, jit: bool = True) -> BoundEngine:
        maker = ContextMaker(self, self, self, ENGINE, self.kernels if jit else None)
        bound = {"token_ids": "ids", "past_length": "past", "logits": "logits"}
        return BoundEngine(maker, self, bound, maker.activations)  # type: ignore[arg-type]


def test_a_context_gets_its_profile_then_its_memory() -> None:
    library = Library()
    library.bind()
    assert library.made == 2
    for number, profile in ((1, 0), (2, 1)):
        assert [call[1:] for call in library.calls if call[0] == number] == [
            ("set_optimization_profile_async", profile, 7),
            ("set_device_memory", 4096, 5000),
            ("set_tensor_address", "token_ids", 100),
            ("set_tensor_address", "past_length", 101),
            ("set_tensor_address", "logits", 102),
        ]
    assert library.config.cuda_graph_strategy == "disabled"
    assert library.config.dynamic_shapes_kernel_specialization_strategy == "eager"


def test_plain_steps_share_a_context_of_their_profile() -> None:
    library = Library()
    run = library.bind()
    library.calls.clear()
    for sizes in (ONE, ONE, TREE, CHUNK, ONE):
        run(sizes)
    ran = "execute_async_v3"
    assert library.calls == [
        (1, "set_input_shape", "token_ids", (1,)), (1, ran, 7), (1, ran, 7),
        (1, "set_input_shape", "token_ids", (9,)), (1, ran, 7),
        (2, "set_input_shape", "token_ids", (80,)), (2, ran, 7),
        (1, "set_input_shape", "token_ids", (1,)), (1, ran, 7),
    ]  # fmt: skip


def test_what_is_recorded_has_a_context_that_nothing_else_touches() -> None:
    library = Library()
    run = library.bind()
    library.recording = True
    for sizes in (TREE, TREE, ONE, ONE):  # each plainly, then recorded
        run(sizes)
    library.recording = False
    run(TREE)  # of a round that was not warmed up
    assert library.made == 4
    for number, new in ((3, 9), (4, 1)):
        mine = [call[1:] for call in library.calls if call[0] == number]
        assert mine[-4:] == [
            ("set_input_shape", "token_ids", (new,)),
            ("is_stream_capturable", 7),
            ("execute_async_v3", 7),
            ("execute_async_v3", 7),
        ]
    assert library.calls[-2:] == [(1, "set_input_shape", "token_ids", (9,)), (1, "execute_async_v3", 7)]


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        ("is_stream_capturable", r"--no-cuda-graphs"),
        ("set_optimization_profile_async", "tensorrt_rtx has no profile 0 .*what the library says"),
        ("set_tensor_address", "refuses the memory of 'token_ids'"),
        ("set_input_shape", r"refuses 'token_ids' \(1,\)"),
        ("execute_async_v3", "cannot run the engine"),
    ],
)
def test_what_the_library_refuses_is_an_error(refused: str, sentence: str) -> None:
    library = Library()
    library.refuses.add(refused)
    library.recording = refused == "is_stream_capturable"
    with pytest.raises(PlanError, match=sentence):
        library.bind()(ONE)


def test_a_shape_that_was_refused_is_set_again() -> None:
    library = Library()
    run = library.bind()
    run(ONE)
    library.refuses.add("set_input_shape")
    with pytest.raises(PlanError):
        run(TREE)
    library.refuses.clear()
    library.calls.clear()
    run(ONE)
    assert library.calls[0] == (1, "set_input_shape", "token_ids", (1,))


def test_tensorrt_is_not_asked_what_it_does_not_know() -> None:
    """Only TensorRT for RTX says whether a context can be recorded, and keeps kernels."""
    library = Library()
    run = library.bind(jit=False)
    library.recording = True
    run(ONE)
    assert "is_stream_capturable" not in {call[1] for call in library.calls}
    assert library.calls[-1] == (3, "execute_async_v3", 7)
    library.recording = False
    run(ONE)
    del run
    gc.collect()
    assert library.saved == 0


def test_kernels_are_saved_after_the_first_plain_step_of_new_contexts_and_when_the_engine_goes() -> None:
    """Not while anything is recorded: what is recorded first runs plainly, but each size for itself."""
    library = Library()
    run = library.bind()
    library.recording = True
    run(TREE)
    assert library.saved == 0
    library.recording = False
    for sizes in (ONE, CHUNK, TREE):
        run(sizes)
        assert library.saved == 1
    library.recording = True  # of the next session
    run(ONE)
    library.recording = False
    run(ONE)
    assert library.saved == 2
    del run
    gc.collect()
    assert library.saved == 3
