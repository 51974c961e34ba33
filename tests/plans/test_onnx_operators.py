"""Engines have no operators but those that the compiler writes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from outrider.plans.errors import PlanError
from outrider.plans.onnx_operators import check_operators, operators
from tests.plans.damage import ENGINE, list_again, refused


def within(name: str, inner: onnx.GraphProto) -> onnx.NodeProto:
    return helper.make_node(name, [], ["y"], then_branch=inner, else_branch=inner)


ADD, DRAW = helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("RandomNormal", [], ["r"], shape=[1])


def model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph(nodes, "g", [], []))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (model(ADD, helper.make_node("Loop", [], ["x"])), "has: Loop;"),
        (model(ADD, helper.make_node("Mul", ["a", "b"], ["c"], domain="com.other")), "has: com.other.Mul;"),
        (model(within("If", helper.make_graph([DRAW], "inner", [], []))), "has: RandomNormal;"),
        (
            helper.make_model(
                helper.make_graph([ADD], "g", [], []),
                functions=[helper.make_function("ours", "F", ["a"], ["c"], [DRAW], [helper.make_opsetid("", 20)])],
            ),
            "has: RandomNormal;",
        ),
    ],
)
def test_what_no_engine_has_is_refused(found: onnx.ModelProto, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "engine.onnx").write_bytes(found.SerializeToString())
    with pytest.raises(PlanError, match=said):
        check_operators(path)


def test_what_others_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    """A field's number of more than 32 bits, which they cut; a function in an operator's place; a file's other name."""
    data = model(DRAW).SerializeToString()
    at = data.index(b"\x3a")
    function = helper.make_function("", "RandomNormal", ["a"], ["c"], [ADD], [helper.make_opsetid("", 20)])
    shadowed = helper.make_model(helper.make_graph([DRAW], "g", [], []), functions=[function])
    for name, written in (
        ("a.onnx", data[:at] + b"\xba\x80\x80\x80\x10" + data[at + 1 :]),
        ("b.onnx", shadowed.SerializeToString()),
        ("c.ort", model(ADD).SerializeToString()),
    ):
        (tmp_path / name).write_bytes(written)
        with pytest.raises(PlanError, match="is not an ONNX graph"):
            check_operators(tmp_path / name)


@given(st.integers(0, 200), st.binary(max_size=3))
def test_reading_a_damaged_file_ends(at: int, put: bytes) -> None:
    data = model(ADD, DRAW).SerializeToString()
    with suppress(IndexError, ValueError):
        operators(data[:at] + put + data[at + len(put) :])


def test_a_plan_with_such_an_engine_does_not_load(plan: Path) -> None:
    graph = onnx.load(str(plan / ENGINE), load_external_data=False)
    graph.graph.node.append(DRAW)
    (plan / ENGINE).write_bytes(graph.SerializeToString())
    list_again(plan)
    assert "has operators that no engine of Outrider has: RandomNormal;" in refused(plan)
