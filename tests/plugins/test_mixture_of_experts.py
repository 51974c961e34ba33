"""Experts and their choice: the kernels of every instruction set have the reference's bits, in any company."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import int4
from numpy.typing import NDArray
from onnx import TensorProto, checker, helper, numpy_helper

from outrider.plugins.onnx_ops import DOMAIN, FUNCTIONS, OPSET, VERSION
from outrider.plugins.panel_layout import pack_panels
from outrider.plugins.quant_layout import QuantLayout, fits_half, pack
from outrider.plugins.reference import (
    Expert,
    clamped_unit,
    dequantize,
    gated_unit,
    mixture_of_experts,
    ordered_matmul,
    quant_matmul,
    route,
)
from outrider.plugins.schema import CPU_DOMAIN
from tests.cpu_session import cpu_session
from tests.instruction_sets import Results

Float32 = NDArray[np.float32]
ALPHA, LIMIT = 1.702, 7.0
BLOCK = 32


@cache
def session(op: str, inputs: Sequence[tuple[str, int]], threads: int, **attributes: Any) -> ort.InferenceSession:
    """Return a session of one op; `inputs` are names and ranks, and an empty name is an absent input."""

    def info(name: str, rank: int) -> Any:
        kind = TensorProto.UINT8 if name.startswith("packed") else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, [None] * rank)

    graph = helper.make_graph(
        [helper.make_node(op, [name for name, _ in inputs], ["y"], domain=CPU_DOMAIN, **attributes)],
        "experts",
        [info(*each) for each in inputs if each[0]],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3)],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(CPU_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return cpu_session(model.SerializeToString(), threads)


def routed(
    x: Float32, router: Float32, bias: Float32 | None, top_k: int, *, normalise: bool, threads: int = 1
) -> Float32:
    inputs = (("x", 3), ("router", 4), *(() if bias is None else (("bias", 1),)))
    op = session("Route", inputs, threads, experts=router.shape[1], top_k=top_k, normalise=int(normalise))
    given = {"x": x[None], "router": pack_panels(router[None])} | ({} if bias is None else {"bias": bias})
    (found,) = op.run(None, given)
    return found[0]


@dataclass(frozen=True)
class Layer:
    """Experts of a layer: weights `[E, in, out]`, or integers and scales `[E, out, in]`, and biases `[E, out]`."""

    gate: Any
    up: Any
    down: Any
    biases: tuple[Float32, Float32, Float32] | None = None
    bits: int | None = None

    @property
    def products(self) -> tuple[Any, Any, Any]:
        return self.gate, self.up, self.down

    @property
    def experts(self) -> int:
        return len(self.gate if self.bits is None else self.gate[0])

    @property
    def hidden(self) -> int:
        return self.gate.shape[1] if self.bits is None else self.gate[0].shape[2]

    def reference(self, x: Float32, weights: Float32) -> Float32:
        def product(which: int, expert: int) -> Any:
            weight, bias = self.products[which], None if self.biases is None else self.biases[which][expert]

            def multiply(rows: Float32) -> Float32:
                if self.bits is None:
                    found = ordered_matmul(rows, weight[expert])
                else:
                    found = quant_matmul(rows, *(None if part is None else part[expert] for part in weight))
                return found if bias is None else found + bias

            return multiply

        unit = gated_unit if self.biases is None else partial(clamped_unit, alpha=ALPHA, limit=LIMIT)
        count = weights.shape[1]
        experts = [Expert(*(product(which, expert) for which in range(3))) for expert in range(count)]
        return mixture_of_experts(x, weights, experts, unit)

    def run(self, x: Float32, weights: Float32, threads: int = 1) -> Float32:
        given: dict[str, Any] = {"x": x[None], "weights": weights[None]}
        attributes: dict[str, Any] = {"alpha": ALPHA, "limit": 0.0 if self.biases is None else LIMIT}
        attributes |= {"experts": self.experts, "hidden": self.hidden}
        if self.bits is None:
            given |= {f"panels.{i}": pack_panels(weight) for i, weight in enumerate(self.products)}
            attributes["size"] = self.gate.shape[2]
        else:
            layouts = [self._packed(weight) for weight in self.products]
            given |= {f"packed.{i}": packed for i, (packed, _) in enumerate(layouts)}
            layout = layouts[0][1]
            attributes |= {"size": self.gate[0].shape[1], "bits": self.bits}
            attributes |= {"wide": int(layout.wide), "minimums": int(layout.minimums)}
        if self.biases is not None:
            given |= {f"bias.{i}": bias for i, bias in enumerate(self.biases)}
        op = "MixtureOfExperts" if self.bits is None else "QuantMixtureOfExperts"
        inputs = tuple((name, value.ndim) for name, value in given.items())
        return session(op, inputs, threads, **attributes).run(None, given)[0][0]

    def _packed(self, weight: Any) -> tuple[NDArray[np.uint8], QuantLayout]:
        flat = [None if part is None else part.reshape(-1, part.shape[-1]) for part in weight]
        wide = not all(fits_half(part) for product in self.products for part in product[1:] if part is not None)
        layout = QuantLayout(*flat[0].shape, self.bits, wide, flat[2] is not None)
        return pack(*flat, layout), layout


def float_layer(rng: np.random.Generator, experts: int, hidden: int, inner: int, *, biased: bool = False) -> Layer:
    def normal(*shape: int) -> Float32:
        return rng.normal(size=shape).astype(np.float32) * np.float32(shape[-2] ** -0.5)

    weights = [normal(experts, *shape) for shape in ((hidden, inner), (hidden, inner), (inner, hidden))]
    return Layer(*weights, biases_of(rng, experts, hidden, inner) if biased else None)


def quant_layer(
    rng: np.random.Generator,
    experts: int,
    hidden: int,
    inner: int,
    bits: int,
    *,
    biased: bool = False,
    minimums: bool = False,
    wide: bool = False,
) -> Layer:
    def drawn(outputs: int, inputs: int) -> Any:
        low = 0 if minimums else -(1 << (bits - 1))
        integers = rng.integers(low, low + (1 << bits), (experts, outputs, inputs))

        def scales() -> Float32:
            values = rng.normal(size=(experts, outputs, inputs // BLOCK)).astype(np.float32) / np.float32(2**bits)
            return values if wide else values.astype(np.float16).astype(np.float32)

        return integers.astype(np.uint8 if minimums else np.int8), scales(), scales() if minimums else None

    weights = [drawn(*shape) for shape in ((inner, hidden), (inner, hidden), (hidden, inner))]
    return Layer(*weights, biases_of(rng, experts, hidden, inner) if biased else None, bits)


def biases_of(rng: np.random.Generator, experts: int, hidden: int, inner: int) -> tuple[Float32, Float32, Float32]:
    gate, up, down = (rng.normal(size=(experts, size)).astype(np.float32) * 3 for size in (inner, inner, hidden))
    return gate, up, down


def weights_of(rng: np.random.Generator, tokens: int, experts: int, top_k: int, spread: str) -> Float32:
    """Return weights of chosen experts: `even`ly, all tokens the `same` ones, or `sparse`: some tokens with none."""
    weights = np.zeros((tokens, experts), np.float32)
    for token, row in enumerate(weights):
        chosen = (np.arange(experts) if spread == "same" else rng.permutation(experts))[:top_k]
        row[chosen] = rng.random(len(chosen), np.float32) + np.float32(0.01)
        if spread == "sparse" and token % 3 == 1:
            row[:] = 0
    return weights


SHAPES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "tokens": st.integers(1, 40),
        "experts": st.integers(1, 9),
        "top_k": st.integers(1, 4),
        "spread": st.sampled_from(["even", "same", "sparse"]),
        "biased": st.booleans(),
        "threads": st.sampled_from([1, 2, 3]),
    }
)


@given(SHAPES, st.sampled_from([1, 7, 16, 33, 64]), st.sampled_from([1, 5, 16, 17, 48]))
def test_float_experts_have_the_references_bits(shape, hidden, inner) -> None:
    rng = np.random.default_rng(shape["seed"])
    layer = float_layer(rng, shape["experts"], hidden, inner, biased=shape["biased"])
    x = rng.normal(size=(shape["tokens"], hidden)).astype(np.float32) * 4
    weights = weights_of(rng, shape["tokens"], shape["experts"], shape["top_k"], shape["spread"])
    np.testing.assert_array_equal(layer.run(x, weights, shape["threads"]), layer.reference(x, weights))


@given(
    SHAPES, st.sampled_from([32, 64, 96]), st.sampled_from([32, 96, 160]), st.sampled_from([4, 8]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_quantised_experts_have_the_references_bits(shape, hidden, inner, bits, minimums, wide) -> None:
    rng = np.random.default_rng(shape["seed"])
    biased = shape["biased"]
    layer = quant_layer(rng, shape["experts"], hidden, inner, bits, biased=biased, minimums=minimums, wide=wide)
    x = rng.normal(size=(shape["tokens"], hidden)).astype(np.float32) * 4
    weights = weights_of(rng, shape["tokens"], shape["experts"], shape["top_k"], shape["spread"])
    np.testing.assert_array_equal(layer.run(x, weights, shape["threads"]), layer.reference(x, weights))


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 30),
    hidden=st.sampled_from([1, 8, 33]),
    experts=st.sampled_from([1, 4, 16, 33, 60]),
    normalise=st.booleans(),
    biased=st.booleans(),
    whole=st.booleans(),
    threads=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_the_choice_has_the_references_bits(
    seed, tokens, hidden, experts, normalise, biased, whole, threads, data
) -> None:
    """Whole numbers make ties."""
    rng = np.random.default_rng(seed)
    top_k = data.draw(st.integers(1, experts))

    def drawn(*shape: int) -> Float32:
        return (rng.integers(-1, 2, shape) if whole else rng.normal(size=shape) * 3).astype(np.float32)

    x, router, bias = drawn(tokens, hidden), drawn(hidden, experts), drawn(experts) if biased else None
    found = routed(x, router, bias, top_k, normalise=normalise, threads=threads)
    np.testing.assert_array_equal(found, route(x, router, bias, top_k=top_k, normalise=normalise))
    assert ((found != 0).sum(1) <= top_k).all()


def test_equal_experts_are_chosen_by_the_lower_id() -> None:
    found = routed(np.ones((2, 4), np.float32), np.ones((4, 20), np.float32), None, 3, normalise=True)
    np.testing.assert_array_equal(found, [[np.float32(1) / 3] * 3 + [0] * 17] * 2)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_token_has_the_same_bits_in_any_company(bits) -> None:
    rng = np.random.default_rng(3)
    experts, hidden, inner, count = 6, 64, 96, 300
    layer = float_layer(rng, experts, hidden, inner) if bits is None else quant_layer(rng, experts, hidden, inner, bits)
    router = rng.normal(size=(hidden, experts)).astype(np.float32)
    x = rng.normal(size=(count, hidden)).astype(np.float32)

    def both(rows: Float32, threads: int = 1) -> Float32:
        return layer.run(rows, routed(rows, router, None, 2, normalise=True, threads=threads), threads)

    alone = np.concatenate([both(x[i : i + 1]) for i in range(count)])
    for rows in (*range(2, 36), 64, 65, count):
        for threads in (1, 2):
            np.testing.assert_array_equal(both(x[:rows], threads), alone[:rows])
    np.testing.assert_array_equal(both(x[::-1].copy(), 2), alone[::-1])


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_token_alone(bits, value) -> None:
    rng = np.random.default_rng(1)
    layer = float_layer(rng, 4, 32, 32) if bits is None else quant_layer(rng, 4, 32, 32, bits)
    router = rng.normal(size=(32, 4)).astype(np.float32)
    x = rng.normal(size=(9, 32)).astype(np.float32)

    def both(rows: Float32) -> Float32:
        return layer.run(rows, routed(rows, router, None, 2, normalise=True))

    clean = both(x)
    x[4, 7] = value
    found = both(x)
    assert not np.isfinite(found[4]).any()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(clean, 4, 0))


def test_no_token_gives_nothing() -> None:
    rng = np.random.default_rng(1)
    layer, router = float_layer(rng, 4, 32, 32), np.zeros((32, 4), np.float32)
    none = np.zeros((0, 32), np.float32)
    assert routed(none, router, None, 2, normalise=True).shape == (0, 4)
    assert layer.run(none, np.zeros((0, 4), np.float32)).shape == (0, 32)


def test_what_does_not_fit_is_refused() -> None:
    rng = np.random.default_rng(0)
    x, router = np.zeros((2, 32), np.float32), np.zeros((32, 4), np.float32)
    with pytest.raises(Exception, match="top_k is no number of experts"):
        routed(x, router, None, 5, normalise=True)
    with pytest.raises(Exception, match="extent"):
        routed(x[:, 1:], router, None, 2, normalise=True)
    layer, weights = float_layer(rng, 4, 32, 16), np.ones((2, 4), np.float32)
    with pytest.raises(Exception, match="other tokens"):
        layer.run(x, weights[:1])
    with pytest.raises(Exception, match="another number of experts"):
        layer.run(x, weights[:, 1:])
    with pytest.raises(Exception, match="another width"):
        layer.run(x[:, 1:], weights)
    with pytest.raises(Exception, match="extent"):
        dataclasses.replace(layer, up=layer.up[1:]).run(x, weights)
    packed = {f"packed.{i}": np.zeros(1, np.uint8) for i in range(3)}
    inputs = ("x", 3), ("weights", 3), *((name, 1) for name in packed)
    attributes = {"experts": 4, "hidden": 32, "bits": 4, "wide": 0, "minimums": 0, "alpha": 1.0, "limit": 0.0}
    with pytest.raises(Exception, match="multiples of 32"):
        session("QuantMixtureOfExperts", inputs, 1, size=16, **attributes).run(
            None, {"x": x[None], "weights": weights[None]} | packed
        )


def run_body(op: str, given: dict[str, Any], outputs: int, **attributes: Any) -> Float32:
    """Run one of our graph ops by its function body."""
    (x, first), *constants = given.items()
    kind = helper.np_dtype_to_tensor_dtype(first.dtype)
    routes = op.endswith("Route")
    graph = helper.make_graph(
        [helper.make_node(op, list(given), ["y"], domain=DOMAIN, **attributes)], "body",
        [helper.make_tensor_value_info(x, kind, first.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT if routes else kind, [1, first.shape[1], outputs])],
        [numpy_helper.from_array(value, name) for name, value in constants],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, functions=[FUNCTIONS[op]()], opset_imports=opsets, ir_version=11)
    checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString()).run(None, {x: first})[0]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_body_of_route_chooses_the_same(normalise, biased) -> None:
    rng = np.random.default_rng(2)
    x, router = rng.normal(size=(30, 40)).astype(np.float32), rng.normal(size=(40, 9)).astype(np.float32)
    router[:, 5] = router[:, 2]  # equal logits
    bias = rng.integers(-1, 2, 9).astype(np.float32) if biased else None
    given = {"x": x[None], "router": router} | ({} if bias is None else {"bias": bias})
    found = run_body("BiasedRoute" if biased else "Route", given, 9, top_k=3, normalise=int(normalise))[0]
    np.testing.assert_allclose(found, route(x, router, bias, top_k=3, normalise=normalise), rtol=2e-5, atol=1e-7)
    np.testing.assert_array_equal(found != 0, route(x, router, bias, top_k=3, normalise=normalise) != 0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_bodies_compute_the_same_experts(bits, biased) -> None:
    rng = np.random.default_rng(4)
    given: dict[str, Any] = {}
    products = ("gate", "up", "down")
    if bits is None:
        layer = float_layer(rng, 5, 32, 64, biased=biased)
        given |= dict(zip(products, layer.products, strict=True))
    else:
        quantised = quant_layer(rng, 5, 32, 64, bits, biased=biased)
        numbers = []
        for name, (integers, scales, _) in zip(products, quantised.products, strict=True):
            rows = integers.reshape(-1, integers.shape[2]), scales.reshape(-1, scales.shape[2])
            given |= {f"{name}_integers": rows[0].astype(int4 if bits == 4 else np.int8), f"{name}_scales": rows[1]}
            numbers.append(dequantize(*rows).reshape(integers.shape).swapaxes(1, 2).copy())
        layer = Layer(*numbers, quantised.biases)
    if layer.biases is not None:
        given |= {f"{name}_bias": bias for name, bias in zip(products, layer.biases, strict=True)}
    x, weights = rng.normal(size=(20, 32)).astype(np.float32), weights_of(rng, 20, 5, 2, "sparse")
    name = f"{'Clamped' if biased else ''}{'' if bits is None else 'Quant'}MixtureOfExperts"
    attributes = {"alpha": ALPHA, "limit": LIMIT} if biased else {}
    found = run_body(name, {"x": x[None], "weights": weights[None]} | given, 32, **attributes)[0]
    wanted = layer.reference(x, weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_a_body_reads_nothing_of_an_expert_that_was_not_chosen() -> None:
    rng = np.random.default_rng(4)
    layer = float_layer(rng, 3, 8, 8)
    layer.gate[2] = np.inf
    x, weights = rng.normal(size=(4, 8)).astype(np.float32), weights_of(rng, 4, 3, 2, "same")
    given = {"x": x[None], "weights": weights[None], "gate": layer.gate, "up": layer.up, "down": layer.down}
    found = run_body("MixtureOfExperts", given, 8)[0]
    np.testing.assert_allclose(found, layer.reference(x, weights), rtol=1e-4, atol=1e-5)


def of_experts() -> Results:
    """What layers give; `test_instruction_sets.py` compares it."""
    rng = np.random.default_rng(5)
    found: Results = {}
    for tokens in (1, 3, 40):
        for bits in (None, 4, 8):
            for biased in (False, True):
                if bits is None:
                    layer = float_layer(rng, 5, 72, 40, biased=biased)
                else:
                    layer = quant_layer(rng, 5, 96, 64, bits, biased=biased, minimums=biased, wide=bits == 8)
                hidden = 72 if bits is None else 96
                x = rng.normal(size=(tokens, hidden)).astype(np.float32) * 3
                router = rng.normal(size=(hidden, 5)).astype(np.float32)
                weights = routed(x, router, rng.normal(size=5).astype(np.float32), 2, normalise=biased)
                found[f"experts' weights {tokens} {bits} {biased}"] = weights
                found[f"experts {tokens} {bits} {biased}"] = layer.run(x, weights, 2)
    return found
