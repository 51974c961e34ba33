"""Lists of kernel launches and formulas of sizes: what is wrong with one is a sentence, before anything is launched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.compiler.kernels.sizes import largest, product, quotient, size
from outrider.plans import names
from outrider.plans.formulas import formula
from outrider.plans.kernel_engine import KernelEngine, Parameters, problems

LIMITS = dict.fromkeys(names.SYMBOLS, 64)
KERNELS = {
    "outrider_product": Parameters(3, 3, written=frozenset({2}), threads=(32, 256)),
    "outrider_form": Parameters(3, 1, frozenset({1})),
}


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
    return list(problems(KernelEngine.model_validate_json(json.dumps(content)), ("x",), LIMITS, 100, KERNELS))


def test_an_engine_without_faults() -> None:
    assert faults(engine()) == []
    assert faults(engine(kernel="outrider_form", tensors=["x", "", "to"], numbers=["-1"])) == []
    assert faults(engine(blocks="min(1, max(0, N - 8)) * N", moves="M * 4", operations="D")) == []  # 0 blocks: skipped


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensors": ["x", "w", "gone"]}, "launch 0, 'outrider_product': there is no tensor 'gone'"),
        ({"constants": {"w": {"offset": 64, "size": 37}}}, "'w' ends at byte 101 of the weights, which have 100"),
        ({"workspace_size": 255}, "'to' ends at byte 256 of the workspace, which have 255"),
        ({"constants": {"x": {"offset": 0, "size": 1}}}, "two tensors have one name, or one has none"),
        ({"numbers": ["Q", "1", "1"]}, "its formulas name Q, which is no size of a step"),
        ({"blocks": "N - 65"}, "'N - 65', its blocks, is -1, not 0 to 2147483647, at the largest sizes"),
        ({"blocks": "N - 2"}, "'N - 2', its blocks, is -1, not 0 to 2147483647, at the smallest sizes"),
        ({"blocks": "M - 1"}, "'M - 1', its blocks, is -1, not 0 to 2147483647, at the smallest sizes"),
        ({"shared": "300000"}, "'300000', its bytes of shared memory, is 300000, not 0 to 232448, at the"),
        ({"moves": "R - 2"}, "'R - 2', its bytes moved, is -1"),
        ({"operations": "E - 3"}, "'E - 3', its operations, is -1"),
        ({"numbers": ["2" * 20, "1", "1"]}, "one of its numbers, is 22222222222222222222, not -9223372036854775807 to"),
        ({"numbers": ["N // (N - 64)", "1", "1"]}, "divides by zero at the largest sizes"),
        ({"blocks": "8 // (N - 1)"}, "'8 // (N - 1)' divides by zero at the smallest sizes"),
        ({"tensors": ["x", "w", "w"]}, "launch 0, 'outrider_product': it writes to 'w', which all sessions read"),
        ({"threads": 512}, "its blocks have 512 threads, and the kernel takes 32 to 256 in whole warps"),
        ({"threads": 100}, "its blocks have 100 threads, and the kernel takes 32 to 256 in whole warps"),
        ({"kernel": "outrider_gone"}, "launch 0, 'outrider_gone': there is no such kernel"),
        ({"numbers": ["N"]}, "it has 3 tensors and 1 numbers, and the kernel takes 3 and 3"),
        ({"tensors": ["x", "", "to"]}, "tensor 1 is left out, and the kernel needs it"),
    ],
)
def test_faults_are_named(changes: dict[str, Any], said: str) -> None:
    assert any(said in fault for fault in faults(engine(**changes)))


@pytest.mark.parametrize(
    "changes", [{"threads": 2048}, {"kernel": "a b"}, {"weights": "../weights.bin"}, {"blocks": "os.getpid()"}]
)
def test_what_is_no_launch_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        faults(engine(**changes))


def test_turns_of_a_loop_are_known_within_it_alone() -> None:
    launch = engine()["items"][0] | {"numbers": ["turn * 64", "1", "1"]}
    outside = engine() | {"items": [launch | {"blocks": "turn"}]}
    assert faults(engine() | {"items": [{"times": "(N + 63) // 64", "launches": [launch]}]}) == []
    late = engine() | {"items": [{"times": "N - 2", "launches": [launch]}]}
    assert faults(late) == [
        "launch 0, 'outrider_product': 'N - 2', the turns of its loop, is -1, not 0 to 65536, at the smallest sizes"
    ]
    with pytest.raises(ValidationError):
        faults(engine() | {"items": [{"times": "1", "launches": []}]})
    assert faults(outside) == ["launch 0, 'outrider_product': it names turn, and stands in no loop"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("N", 5), ("(N * 4 + 255) // 256", 1), ("min(N, 3) + max(T, 2) % 4", 6), ("-N + 6", 1), ("N - T", -6)],
)
def test_values(text: str, value: int) -> None:
    assert formula(text).value({"N": 5, "T": 11}) == value
    assert formula(text).names == {"N", "T"} & set(text)


@pytest.mark.parametrize(
    "text",
    ["", "N ** 2", "N / 2", "1.5", "True", "N.bit_length()", "abs(N)", "min(N)", "min(N, key=T)", "'N'", "N" * 600],
)
def test_nothing_else_is_a_formula(text: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        formula(text)


SIZES = st.recursive(
    st.one_of(st.integers(0, 9), st.sampled_from(["N", "R", "B"])).map(size),
    lambda inner: st.tuples(inner, inner, st.sampled_from("+-*")).map(
        lambda each: {"+": each[0] + each[1], "-": each[0] - each[1], "*": each[0] * each[1]}[each[2]]
    ),
    max_leaves=6,
)


@given(SIZES, SIZES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_sizes_are_written_as_formulas_of_the_same_value(a, b, n, r, branches) -> None:
    at = {"N": n, "R": r, "B": branches}
    x, y = formula(str(a)).value(at), formula(str(b)).value(at)
    assert (formula(str(a + b)).value(at), formula(str(a * b)).value(at)) == (x + y, x * y)
    assert x <= largest(a, at)
    assert (a + b) - b == a
    if a * b != size(0) and len(b.terms) == 1:
        assert (a * b).divided(b) == a


def test_edges_of_rows_are_one_more_than_rows() -> None:
    assert size("E") - 1 == size("R")
    assert product([size("R"), size(3)]) == size("R") * 3
    assert formula(quotient(size("N") * 2, 256)).value({"N": 200}) == 2
    assert size("N").divided(size("R")) is None
