"""Graphs of the target `tensorrt`: ops around an engine taken into it, and ops as nodes of their plugins.

What such graphs compute is tested in tests/integration/test_inlined_ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import pytest

from outrider.compiler.inlining import inline_stages
from outrider.compiler.lowering import lower
from outrider.compiler.op_nodes import IR_TYPES, node_inputs, node_outputs
from outrider.compiler.programs import stages_around
from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.manifest import Geometry, GraphDrafter, Tree
from outrider.plans.sampling import SETTINGS
from outrider.plans.step_buffers import drafter_buffers, sampling_buffers, status_buffers, target_buffers
from outrider.plugins.onnx_ops import DOMAIN, VERSION
from outrider.plugins.schema import Purpose
from outrider.plugins.schemas import SCHEMAS
from outrider.plugins.tensorrt import PLUGINS, Declined, Plugin

TENSORRT = "tensorrt"
GEOMETRY = Geometry(
    layers=1, heads=2, kv_heads=1, head_dim=4, hidden_size=8, vocab_size=11, context=64, view_bucket=16, capacity=80,
    prefill_chunk=8, branches=1,
)  # fmt: skip
COUPLED = GraphDrafter(kind="model", name="d", tree=Tree(top_k=2, depth=3, nodes=6))
REJECTED = GraphDrafter(kind="model", name="d", tree=Tree(top_k=1, depth=3, nodes=5), acceptance="rejection")
BY_NAME: dict[str, Plugin] = {
    plugin.name: plugin for entry in PLUGINS.values() if not isinstance(entry, Declined) for plugin in entry
}


def memory(drafter: GraphDrafter | None = None) -> dict[str, Tensor]:
    kv = DType.FLOAT32
    listed = [*target_buffers(GEOMETRY, kv, rejection=True), *sampling_buffers(1), *status_buffers()]
    if drafter is not None:
        listed += drafter_buffers(drafter, GEOMETRY, GEOMETRY, kv)
    return {tensor.name: tensor for tensor in listed}


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def target() -> ir.Model:
    """A stand-in of the exported target: a bias and tokens to logits."""
    bias = value(names.ATTN_BIAS, ir.DataType.FLOAT, "R", 1, "S", "T")
    tokens = value(names.TOKEN_IDS, ir.DataType.INT64, "N")
    logits = ir.node("Thing", [bias, tokens], domain="test")
    logits.outputs[0].name, logits.outputs[0].shape = names.LOGITS_OUT, ir.Shape(["M", 11])
    logits.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return model([bias, tokens], [logits])


def drafting(drafter: GraphDrafter) -> ir.Model:
    """A stand-in of a drafter's: a bias, noise and settings, to a tree."""
    real = ir.DataType.FLOAT
    inputs = [
        value(names.ATTN_BIAS, real, 1, 1, "N", "T"),
        value(names.NOISE, real, 1, drafter.tree.depth + 1, 11),
        value(names.DRAFT_SAMPLING, real, 1, SETTINGS),
    ]
    tree = ir.node("Thing", inputs, domain="test")
    tree.outputs[0].name, tree.outputs[0].shape = names.TREE_TOKEN_IDS, ir.Shape([drafter.tree.nodes])
    tree.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    return model(inputs, [tree])


def model(inputs: list[ir.Value], nodes: list[ir.Node]) -> ir.Model:
    graph = ir.Graph(inputs, nodes[-1].outputs, nodes=nodes, opset_imports={"": 24, DOMAIN: VERSION, "test": 1})
    return ir.Model(graph, ir_version=10)


def inlined(drafter: GraphDrafter | None = None) -> ir.Model:
    made = target() if drafter is None else drafting(drafter)
    free = {names.ATTN_BIAS: names.FREE_BIAS} if drafter is None else {}
    name = names.TARGET if drafter is None else drafter.name
    held = inline_stages(made, *stages_around(name, drafter), memory(drafter), free)
    assert set(held) == {node.op_type for node in made.graph if node.domain == DOMAIN}
    return made


def nodes_of(made: ir.Model) -> Mapping[str, ir.Node]:
    return {node.op_type: node for node in made.graph}


def named(values: object) -> list[str | None]:
    return [v.name for v in values if v is not None]  # type: ignore[attr-defined]


def test_a_node_takes_the_sizes_that_no_input_has_and_tells_of_faults() -> None:
    assert [spec.shape for spec in node_inputs("BimMask")[5:]] == [("T",), ("S",)]
    assert node_inputs("TreeAccept") == SCHEMAS["TreeAccept"].inputs
    assert (node_outputs("TreeAccept")[-1].name, node_outputs("TreeAccept")[-1].shape) == (names.STATUS, (1,))
    assert (node_outputs("Sample")[-1].name, node_outputs("Sample")[-1].shape) == (names.STATUS, (names.LOGITS,))
    assert node_outputs("BimMask") == SCHEMAS["BimMask"].outputs


def test_the_target_makes_its_bias_and_accepts() -> None:
    made = inlined()
    nodes = nodes_of(made)
    taken = named(made.graph.inputs)
    assert set(taken) == {
        *(names.ATTN_BIAS, names.TOKEN_IDS, names.FREE_BIAS, names.LOGIT_INDICES),
        *(spec.name for spec in (*SCHEMAS["BimMask"].inputs, *SCHEMAS["TreeAccept"].inputs)),
    } - {names.LOGITS_OUT}
    assert named(made.graph.outputs) == [
        names.LOGITS_OUT, *(spec.name for spec in SCHEMAS["TreeAccept"].outputs), names.STATUS,
    ]  # fmt: skip
    chosen = nodes["Where"]
    assert named(chosen.inputs)[1] == names.ATTN_BIAS
    assert chosen.inputs[2] is nodes["BimMask"].outputs[0]
    assert nodes["Thing"].inputs[0] is chosen.outputs[0]
    assert nodes["Shape"].inputs[0] is not None
    assert (nodes["Shape"].inputs[0].name, nodes["Shape"].attributes.get_int("start")) == (names.ATTN_BIAS, 3)
    types = {v.name: (v.dtype, [str(d) for d in v.shape]) for v in made.graph.inputs if v.shape is not None}
    assert types[names.SAMPLING] == (ir.DataType.DOUBLE, ["1", str(SETTINGS)])
    assert types[names.SEED] == (ir.DataType.UINT64, ["1"])
    assert types[names.BIM] == (ir.DataType.INT64, ["R", "80"])


def test_a_drafters_bias_is_always_its_own_and_of_the_given_one_the_length_counts() -> None:
    made = inlined(COUPLED)
    nodes = nodes_of(made)
    assert "Where" not in nodes
    assert {use.node.op_type for use in made.graph.inputs[0].uses()} == {"Shape"}
    assert {names.NOISE, names.DRAFT_SAMPLING}.isdisjoint(named(made.graph.inputs))
    thing = nodes["Thing"]
    assert thing.inputs[0] is nodes["BimMask"].outputs[0]
    assert list(thing.inputs[1:]) == [*nodes["RaceNoise"].outputs]


@pytest.mark.parametrize("drafter", [None, COUPLED, REJECTED], ids=["target", "coupled", "rejection"])
def test_plugins_get_what_the_table_says(drafter: GraphDrafter | None) -> None:
    made = inlined(drafter)
    reports = {report.rule: report for report in lower("x", made, TENSORRT, rows=1)}
    assert reports["PluginNodes"].applied == 2
    assert made.functions == {}
    found = [node for node in made.graph if node.domain == DOMAIN]
    for node in found:
        plugin = BY_NAME[node.op_type]
        assert len(node.outputs) == len(plugin.outputs)
        for spec, given in zip(plugin.inputs, node.inputs, strict=True):
            assert given is not None
            assert given.dtype in (None, IR_TYPES[spec.dtype]), spec.name
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        assert attributes.pop("plugin_namespace") == "outrider"
        assert attributes.pop("plugin_version") == "1"
        assert set(attributes) == set(plugin.attributes)
    by_name = {node.op_type: node for node in found}
    mask = by_name["BimMask"]
    assert named(mask.inputs)[:6] == [*(spec.name for spec in SCHEMAS["BimMask"].inputs), names.BRANCH]
    assert mask.inputs[6] is nodes_of(made)["Expand"].outputs[0]
    if drafter is None:
        choices, walk = by_name["TreeChoices"], by_name["TreeWalk"]
        assert choices.attributes["purpose"].value == int(Purpose.TARGET)
        assert [*walk.inputs[2:4]] == [*choices.outputs[:2]]
        assert named(walk.inputs)[-1] == names.STREAM  # of one place for each slot
        assert named(walk.outputs) == [*(spec.name for spec in SCHEMAS["TreeAccept"].outputs), names.STATUS]
        assert walk.outputs[-1] in made.graph.outputs
    else:
        noise = {name: by_name["RaceNoise"].attributes[name].value for name in ("depths", "V", "purpose")}
        assert noise == {"depths": 4, "V": 11, "purpose": int(Purpose.TARGET if drafter is COUPLED else Purpose.DRAFT)}


def test_a_plugin_that_is_called_like_its_op_gets_no_function_body(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = SCHEMAS["TreeRerank"]
    plugin = Plugin("TreeRerank", BY_NAME["RaceNoise"].launch, schema.inputs, schema.outputs, attributes=("nodes",))
    inputs = [value(spec.name, ir.DataType.INT64, 1, 8) for spec in schema.inputs]
    node = ir.node("TreeRerank", inputs, {"nodes": 4}, domain=DOMAIN, num_outputs=len(schema.outputs))
    for output in node.outputs:
        output.shape = ir.Shape([1, 3])
    made = model(inputs, [node])
    monkeypatch.setitem(PLUGINS, "TreeRerank", (plugin,))
    lower("x", made, TENSORRT, rows=1)
    assert made.functions == {}
    (lowered,) = made.graph
    assert (lowered.op_type, lowered.attributes["nodes"].value) == ("TreeRerank", 4)
    assert "plugin_namespace" in lowered.attributes


def test_what_is_no_plugin_gets_its_body_and_the_reason_is_told() -> None:
    """Attention over several rows, which is not lowered to TensorRT's own layers."""
    q, cache = (1, "N", 8), ("R", 1, 80, 4)
    shapes = [q, (1, "N", 4), (1, "N", 4), cache, cache, ("R", 1, "S", "T"), ("R",), ("E",)]
    kinds = [ir.DataType.FLOAT] * 6 + [ir.DataType.INT64] * 2
    specs = SCHEMAS["BranchAttention"].inputs[: len(shapes)]  # without sinks
    inputs = [value(spec.name, kind, *shape) for spec, kind, shape in zip(specs, kinds, shapes, strict=True)]
    attributes = {"num_heads": 2, "kv_num_heads": 1, "scale": 0.5}
    node = ir.node("BranchAttention", inputs, attributes, domain=DOMAIN, num_outputs=3)
    made = model(inputs, [node])
    reports = {report.rule: report for report in lower("x", made, TENSORRT, rows=2)}
    declined = PLUGINS["BranchAttention"]
    assert isinstance(declined, Declined)
    assert reports["PluginNodes"].declined == {declined.reason: 1}
    assert [name for _, name, _ in made.functions] == ["BranchAttention"]


def test_what_a_builder_cannot_know_is_named() -> None:
    given = [value(spec.name, ir.DataType.INT64, "N") for spec in SCHEMAS["RaceNoise"].inputs]
    node = ir.node("RaceNoise", given, domain=DOMAIN, num_outputs=4)
    with pytest.raises(ValueError, match="the plugin of RaceNoise wants 'depths', which its node does not tell"):
        lower("x", model(given, [node]), TENSORRT, rows=1)
