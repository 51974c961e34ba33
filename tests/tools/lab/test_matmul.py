"""The bench of products: every engine multiplies the same weights, and the table holds what was measured."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.plugins.reference import dequantize
from outrider.tools.lab.matmul.__main__ import main
from outrider.tools.lab.matmul.measure import OURS, figures, load
from outrider.tools.lab.matmul.shapes import SHAPES, ModelShape, Product
from outrider.tools.lab.matmul.weights import draw_weight, of_layer

Captured = pytest.CaptureFixture[str]
SMALL = ModelShape(hidden=128, layers=3, intermediate=96, heads=2, kv_heads=1, vocab=160)


def exact(products: list[Product], bits: int, x: NDArray[np.float32]) -> NDArray[np.float64]:
    value = x.astype(np.float64)
    for product in products:
        weight = draw_weight(product, bits)
        table = dequantize(of_layer(weight.integers, product), of_layer(weight.scales, product))
        value = value[..., : product.inputs] @ table.astype(np.float64).T
    return value


@pytest.mark.parametrize("bits", [4, 8])
def test_every_engine_multiplies_the_same_weights(bits: int) -> None:
    """A product is off by half a step of max / 127 at each input, some 0.5 %; 13 in a chain by less than 4 %."""
    x = np.random.default_rng(0).standard_normal((1, 5, SMALL.hidden), np.float32)
    expected = exact(SMALL.products(), bits, x)
    chains = load(SMALL.products(), bits, 1)
    assert set(chains) >= {OURS, "onnxruntime"}
    assert ("openvino" in chains) == (importlib.util.find_spec("openvino") is not None)
    for engine, chain in chains.items():
        one = chain.bind(x)
        one()
        off = np.linalg.norm(one.output - expected) / np.linalg.norm(expected)
        assert 1e-4 < off < 0.04, engine  # activations of 8 bits, all of them


def test_layers_have_the_same_weights_in_another_order() -> None:
    product = Product(1, 64, 96)
    weight = draw_weight(product, 4)
    turned = of_layer(weight.integers, product)
    np.testing.assert_array_equal(turned, np.roll(weight.integers, 32, axis=0))
    assert not np.array_equal(turned, weight.integers)
    np.testing.assert_array_equal(of_layer(weight.scales, product), np.roll(weight.scales, 32, axis=0))


def test_a_model_has_the_products_of_its_shape() -> None:
    assert SHAPES["150m"].weights + 1024 * 768 == pytest.approx(150e6, rel=0.01)
    assert SHAPES["1b"].weights == 16 * 2048 * (3072 + 2048 + 3 * 8192) + 2048 * 32768
    for shape in SHAPES.values():
        for product in shape.products():
            assert product.outputs % 32 == 0 or product.outputs == 2 * shape.intermediate
            assert product.inputs % 16 == 0


def test_ratios_are_ours_over_theirs() -> None:
    one_row = {OURS: [[2.0, 1.0], [3.0, 2.0]], "other": [[4.0, 4.0], [5.0, 5.0]]}
    eight = {OURS: [[2.0, 3.0], [4.0, 2.0]], "other": [[8.0, 5.0], [6.0, 6.0]]}
    ours, other = figures(eight, one_row)
    assert (ours["min_ms"], ours["median_ms"], ours["against_first"], ours["ratio"]) == (2, 2.5, 2, None)
    assert (other["min_ms"], other["against_first"], other["ratio"]) == (5, 1.25, 0.4)
    assert other["median_ratio"] == pytest.approx((2.5 / 6.5 + 3 / 6) / 2)


def test_the_command_prints_a_row_for_every_engine(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(SHAPES, "40m", SMALL)
    given = ["--shape", "40m", "--rows", "1,3", "--types", "int4", "--reps", "1", "--threads", "1"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    engines = [OURS, *(engine for engine in ("onnxruntime", "openvino") if engine in found["versions"])]
    assert [(row["rows"], row["engine"]) for row in found["rows"]] == [(n, e) for n in (1, 3) for e in engines]
    assert found["weights"] == {"40m": SMALL.weights}
    assert main(given) == 0
    assert "ours / onnxruntime" in capsys.readouterr().out
    for word, said in [("--shape=7b", "--shape is '7b'; choose from 40m, 150m"), ("--types=fp8", "--types is 'fp8'")]:
        assert main([word]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
