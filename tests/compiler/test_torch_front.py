"""Engines through Torch-TensorRT: real ones, for TensorRT for RTX, and what their networks compute."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from outrider.compiler.backends.tensorrt_rtx import TensorRtRtxBackend
from outrider.compiler.build import build
from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.engines import tensorrt, torch_front, torch_tensorrt
from outrider.compiler.engines.tensorrt import OnnxFront
from outrider.compiler.export import export_draft, export_target
from outrider.compiler.inspect import describe
from outrider.compiler.lowering import lower
from outrider.compiler.models.drafting import DecoderDraft
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.recipe import load_recipe
from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.manifest import Tree
from outrider.plugins.tensorrt.log import make_log
from tests.compiler.network_numpy import Reading

trt = pytest.importorskip("tensorrt_rtx")
pytestmark = pytest.mark.usefixtures("fresh_exports")  # it takes the exported program
try:
    version("torch-tensorrt-rtx")
except PackageNotFoundError:
    pytest.skip("torch-tensorrt-rtx is not installed", allow_module_level=True)

RTX = "tensorrt-rtx"
CAPACITY = 256
TAPS = (0, 1)


@pytest.fixture(scope="module")
def log() -> Any:
    return make_log(trt)


@pytest.fixture(scope="module")
def front(log: Any) -> Any:
    return torch_front.TorchFront(trt, log)


@pytest.fixture(scope="module")
def builder(log: Any) -> Any:
    return trt.Builder(log)


def lowered(checkpoint: Path, dtype: Any = "float32", taps: tuple[int, ...] = TAPS) -> ir.Model:
    graph = export_target(defer_decoder(checkpoint, dtype), CAPACITY, taps).clone()
    lower("target", graph, RTX, rows=1)
    return graph


def network_of(builder: Any, front: Any, model: ir.Model, workplace: Path) -> tuple[Any, Any]:
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return network, front.fill("target", model, network, workplace)


# float32 sums in other orders; weights and every result rounded to float16, whose steps are 2e-3 at these logits
@pytest.mark.parametrize(
    ("model", "dtype", "tolerance"),
    [
        ("drafter", "float32", 2e-5),
        pytest.param("target", "float32", 2e-5, marks=pytest.mark.long),
        pytest.param("target", "float16", 0.1, marks=pytest.mark.long),
    ],
)
def test_the_network_computes_what_the_model_does(
    model: str, dtype: str, tolerance: float, builder: Any, front: Any, log: Any, toy_recipe: Path, tmp_path: Path
) -> None:
    """In chunks over poisoned caches; so does the parser's network, which checks the reading itself."""
    checkpoint = toy_recipe.parent / model
    decoder = load_decoder(checkpoint, "float32")
    graph = lowered(checkpoint, dtype, TAPS[: decoder.config.num_layers])
    config = decoder.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 11)
    expected = sequence_logits(decoder, tokens.tolist()).numpy()
    for reader in (front, OnnxFront(trt, log)):
        log.clear()
        network, _held = network_of(builder, reader, graph.clone(), tmp_path)
        assert log.said() == "it gives no reason"
        shape = (1, config.num_kv_heads, CAPACITY, config.head_dim)
        caches = {
            make(layer): np.full(shape, 3.0, dtype)
            for layer in range(config.num_layers)
            for make in (names.k_cache, names.v_cache)
        }
        begin = 0
        for end in (6, 7, 11):
            positions = np.arange(begin, end)
            view = end + 2  # keys that nothing has written yet are in view, and masked
            seen = np.arange(view)[None, :] <= positions[:, None]
            reading = Reading(
                trt,
                network,
                {
                    names.TOKEN_IDS: tokens[begin:end],
                    names.POSITIONS: positions,
                    names.ATTN_BIAS: np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)[None, None],
                    names.PAST_LENGTH: np.array([begin]),
                    names.LOGIT_INDICES: np.arange(end - begin)[::-1].copy(),
                    **caches,
                },
            )
            found = reading[names.LOGITS_OUT]
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected[begin:end][::-1], atol=tolerance)
            embedded = decoder.embedding.detach().numpy()[tokens[begin:end]]
            features = reading[names.FEATURES][:, : config.hidden_size]
            np.testing.assert_array_equal(features, embedded.astype(dtype).astype(np.float32))
            caches = {name: reading[names.cache_output(name)] for name in caches}
            begin = end


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_engines_of_every_type_are_built(dtype: str, front: Any, toy_recipe: Path, tmp_path: Path) -> None:
    section = f"{{kind: {RTX}, dtype: {dtype}, compute_capabilities: [sm_80], frontend: torch-tensorrt}}"
    head = "{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 2, depth: 1, nodes: 4}}"
    drafters = head if dtype == "float32" else ""
    recipe = load_recipe(toy_recipe, [f"backends=[{section}]", f"drafters=[{drafters}]"])
    plan = build(recipe, toy_recipe, tmp_path / "plan").plan.manifest
    engines = plan.backends[RTX].engines
    caches = 2 * plan.models["target"].layers
    assert engines["target"].layers["KV_CACHE_UPDATE"] == len(engines["target"].aliases) == caches
    assert ("ATTENTION_INPUT" in engines["target"].layers) == (dtype != "float32")
    assert plan.tools[f"{RTX} frontend"].startswith("torch-tensorrt-rtx ")
    if drafters:
        declined = f"onnx: {front.name} has no converter of tree_expand, tree_rerank"
        assert engines["head"].front_end == declined
    shown = describe(tmp_path / "plan")["backends"][RTX]["engines"]["target"]
    assert shown["front_end"] == front.name


@pytest.mark.long
def test_attention_in_half_precision_has_the_models_mask(
    builder: Any, front: Any, toy_recipe: Path, tmp_path: Path
) -> None:
    """Bounded to the type's range: -inf - -inf would poison rows that see nothing."""
    network, _held = network_of(builder, front, lowered(toy_recipe.parent / "target", "float16"), tmp_path)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    attention = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    for layer in attention:
        layer.__class__ = trt.IAttentionInputLayer
    ((mask, dtype),) = {(layer.attention.mask.name, layer.attention.mask.dtype) for layer in attention}
    assert dtype == trt.DataType.HALF
    seen = np.where(np.tri(2, 5, dtype=bool), 0, -np.inf).astype(np.float32)[None, None]
    bounded = Reading(trt, network, {names.ATTN_BIAS: seen})[mask]
    np.testing.assert_array_equal(bounded, np.where(seen == 0, 0, -65504.0).astype(np.float16))


def test_the_package_tensorrt_stays_what_it_was(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with torch_tensorrt.using_its_tensorrt():
        assert sys.modules["tensorrt"].Builder is trt.Builder
        sys.modules["tensorrt.plugin"] = trt
    assert not [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]
    other = type(sys)("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", other)
    with torch_tensorrt.using_its_tensorrt():
        assert sys.modules["tensorrt"] is not other
    assert sys.modules["tensorrt"] is other


def test_a_wrong_or_missing_wheel_is_named_before_anything_is_exported(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.1+cu130")
        said = r"is for torch.*2\.13.*, and 2\.99\.1 is here; run .*torch-tensorrt-rtx==2\.99\.\*"
        with pytest.raises(PlanError, match=said):
            torch_tensorrt.load_torch_tensorrt("tensorrt_rtx")
    monkeypatch.setattr(torch_tensorrt, "_WHEELS", {"tensorrt_rtx": "torch-tensorrt-none"})
    recipe = load_recipe(toy_recipe, [f"backends=[{{kind: {RTX}, frontend: torch-tensorrt}}]"])
    steps: list[str] = []
    with pytest.raises(PlanError, match="needs torch-tensorrt-none, which is not installed; run `pip install"):
        build(recipe, toy_recipe, tmp_path / "plan", lambda done, total, text: steps.append(text))
    assert steps == []


def test_an_op_without_converter_is_a_sentence(
    builder: Any, front: Any, toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_front.OneRowConverters, "converter", lambda self, target: None)
    with pytest.raises(
        PlanError, match=r"engine target: torch_tensorrt .* cannot convert it: it has no converter of onnx\.Rotary"
    ):
        network_of(builder, front, lowered(toy_recipe.parent / "drafter", taps=()), tmp_path)


@pytest.mark.parametrize("plugins", [False, True])
def test_ops_around_an_engine_stay_outside_where_the_program_is_read(
    plugins: bool, toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = TensorRtRtxBackend(kind=RTX)
    monkeypatch.setattr(TensorRtRtxBackend, "holds_ops", plugins)
    decoder = load_decoder(toy_recipe.parent / "drafter", "float32")
    graphs = [
        export_target(decoder, CAPACITY),
        export_draft(DecoderDraft(decoder), Tree(top_k=1, depth=0, nodes=2), 256, decoder.config.vocab_size),
    ]
    parsing, converting = (
        tensorrt.TensorRtEngines(tmp_path, library, lambda _: None, front) for front in (None, torch_front.TorchFront)
    )
    assert [parsing.takes_ops(graph) for graph in graphs] == [plugins, plugins]
    assert [converting.takes_ops(graph) for graph in graphs] == [False, plugins]
