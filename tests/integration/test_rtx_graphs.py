"""Sessions over graphs as they are lowered for `tensorrt-rtx`, up to the library: they run on the CPU, in the memory of
an emulated device, recorded with our ops as that backend records its engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import outrider.compiler.lowering as lowering
from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.runtime.options.options import Options
from tests.conftest import TOY_DRAFTERS, made_once
from tests.integration.long_context import prompt
from tests.integration.shifting_rule import Shifting
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice, driven

pytest.importorskip("cuda.core")

PREFIX = prompt(3, 40)
PLAIN = Options(max_new_tokens=16, ignore_eos=True, auto_disable=False, temperature=0.8, seed=4)


@pytest.fixture(scope="module")
def rtx_graphs_plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sequences in one row, with every drafter, by the rules of `tensorrt-rtx`."""
    targets = f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_80]}}]"
    recipe = load_recipe(toy_recipe, ["capacity.branches=4", targets])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lowering.RULES, CUDA, lowering.RULES["tensorrt-rtx"])
        return made_once(tmp_path_factory, "rtx-graphs-plan", lambda out: build(recipe, toy_recipe, out))


@contextmanager
def emulated_engines(device: EmulatedDevice, records: bool = True) -> Iterator[None]:
    """For a while the engines of that plan run on the device, launched as the backend launches its own."""
    backend = EmulatedBackend(device, records=records, records_engines=True)
    with driven(CUDA, lambda target: backend):
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "kernel by kernel"])
def runtime(request: pytest.FixtureRequest, rtx_graphs_plan: Path, emulator: Emulator) -> Iterator[Runtime]:
    with emulated_engines(EmulatedDevice(emulator), request.param):
        found = Runtime.load(rtx_graphs_plan, prefix_cache=PrefixCacheConfig(max_cached_tokens=512))
        yield found
        found.close()


def expect_branches(runtime: Runtime, oracle: Runtime, drafters: Sequence[str], prefix: list[int]) -> None:
    own = [[7 + place] for place in range(4)]
    asked = [
        {"prompt": tokens, "stream_id": 0, "drafter": drafter, **PLAIN}
        for tokens, drafter in zip(own, drafters, strict=True)
    ]
    found = runtime.generate_branches(prefix, asked)  # type: ignore[arg-type]
    assert [each.token_ids for each in found] == [
        oracle.generate([*prefix, *tokens], drafter="none", **PLAIN).token_ids for tokens in own
    ]


def expect_requests_with_the_prefix_cache(
    runtime: Runtime, oracle: Runtime, drafters: Sequence[str], prefix: list[int]
) -> None:
    prompts = [[*prefix, 30 + place] for place in range(4)]
    expected = [oracle.generate(each, drafter="none", **PLAIN).token_ids for each in prompts]
    asked = [(each, Options(drafter=drafter) | PLAIN) for each, drafter in zip(prompts, drafters, strict=True)]
    for _ in range(2):
        found = [handle.result() for handle in runtime.submit_all(asked)]
        assert [each.token_ids for each in found] == expected
    assert all(each.stats.reused_tokens >= len(prefix) - 1 for each in found)


@pytest.mark.parametrize("shift", range(0, len(TOY_DRAFTERS), 2))
def test_branches_with_every_drafter(runtime: Runtime, toy: Runtime, shift: int) -> None:
    drafters = ["none", *TOY_DRAFTERS] * 2
    expect_branches(runtime, toy, drafters[shift : shift + 4], PREFIX)


def test_requests_with_the_prefix_cache(runtime: Runtime, toy: Runtime) -> None:
    expect_requests_with_the_prefix_cache(runtime, toy, ["none", "bushy", "head", "ngram"], PREFIX)


@pytest.mark.parametrize("drafter", ["none", "bushy", "head"])
def test_rules_and_log_probabilities(runtime: Runtime, toy: Runtime, drafter: str) -> None:
    options = PLAIN | Options(constraint=Shifting(), logprobs=2)
    expected, found = (
        toy.generate(PREFIX, drafter="none", **options),
        runtime.generate(PREFIX, drafter=drafter, **options),
    )
    assert found.token_ids == expected.token_ids
    assert [entry.top[0][0] for entry in found.logprobs] == [entry.top[0][0] for entry in expected.logprobs]


def test_beam_search(runtime: Runtime, toy: Runtime) -> None:
    ours, theirs = (each.beam_search(PREFIX, beams=3, max_new_tokens=6) for each in (runtime, toy))
    assert [beam.token_ids for beam in ours] == [beam.token_ids for beam in theirs]
