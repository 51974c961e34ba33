"""Lists of kernel launches: what is wrong with one is a sentence, before anything is launched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from plans import names
from plans.kernel_engine import KernelEngine, problems

LIMITS = dict.fromkeys(names.SYMBOLS, 64)


def engine(**changes: Any) -> dict[str, Any]:
    launch = {
        "kernel": "outrider_product", "tensors": ["x", "w", "to"], "numbers": ["N", "32", "64"], "blocks": "N * 2",
        "threads": 256, "shared": "1024",
    }  # fmt: skip
    found: dict[str, Any] = {
        "weights": "weights.bin", "constants": {"w": {"offset": 0, "size": 100}},
        "workspace": {"to": {"offset": 0, "size": 256}}, "workspace_size": 256,
    }  # fmt: skip
    of_launch = {name: change for name, change in changes.items() if name not in found}
    return {**found, "items": [launch | of_launch], **{name: changes[name] for name in found if name in changes}}


def faults(content: dict[str, Any]) -> list[str]:
    return list(problems(KernelEngine.model_validate_json(json.dumps(content)), ("x",), LIMITS, 100))


def test_an_engine_without_faults() -> None:
    assert faults(engine()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensors": ["x", "w", "gone"]}, "launch 0, 'outrider_product': there is no tensor 'gone'"),
        ({"constants": {"w": {"offset": 64, "size": 37}}}, "'w' ends at byte 101 of the weights, which have 100"),
        ({"workspace_size": 255}, "'to' ends at byte 256 of the workspace, which have 255"),
        ({"constants": {"x": {"offset": 0, "size": 1}}}, "two tensors have one name, or one has none"),
        ({"numbers": ["Q"]}, "its formulas name Q, which is no size of a step"),
        ({"blocks": "N - 65"}, "'N - 65' blocks are no grid at the largest sizes"),
        ({"blocks": "2147483648"}, "blocks are no grid at the largest sizes"),
        ({"shared": "300000"}, "bytes of shared memory are more than a block may have"),
        ({"numbers": ["N // (N - 64)"]}, "divides by zero"),
    ],
)
def test_faults_are_told(changes: dict[str, Any], said: str) -> None:
    assert any(said in fault for fault in faults(engine(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 0}, {"threads": 2048}, {"kernel": "a b"}, {"weights": "../weights.bin"}, {"blocks": "os.getpid()"},
        {"constants": {"w": {"offset": -1, "size": 1}}}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_launch_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        faults(engine(**changes))


def test_turns_of_a_loop_are_known_within_it_alone() -> None:
    launch = engine()["items"][0] | {"numbers": ["turn * 64"]}
    outside = engine() | {"items": [launch | {"numbers": ["turn"], "blocks": "turn"}]}
    assert faults(engine() | {"items": [{"times": "(N + 63) // 64", "launches": [launch]}]}) == []
    assert faults(outside) == ["launch 0, 'outrider_product': it names turn, and stands in no loop"]
