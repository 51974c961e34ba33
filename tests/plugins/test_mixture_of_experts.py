"""Experts and their choice: the kernels have the reference's bits, in any company."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import int4
from numpy.typing import NDArray

from outrider.plugins.ops.mixture_of_experts import Expert, mixture_of_experts
from outrider.plugins.ops.route import route
from outrider.plugins.panel_layout import pack_panels
from outrider.plugins.quant_layout import QuantLayout, fits_half, pack
from outrider.plugins.reference import clamped_unit, dequantize, gated_unit, ordered_matmul, quant_matmul
from tests.instruction_sets import Results
from tests.plugins.onnx_node import BYTES, FLOAT, body_session, kernel_session

Float32 = NDArray[np.float32]
ALPHA, LIMIT = 1.702, 7.0
BLOCK = 32


def run_kernel(op: str, given: dict[str, Any], threads: int = 1, **attributes: Any) -> Float32:
    """Return the only output of one of our kernels."""
    inputs = tuple(
        (name, BYTES if name.startswith("packed") else FLOAT, array.ndim) for name, array in given.items()
    )  # fmt: skip
    (found,) = kernel_session(op, inputs, (("y", FLOAT, 3),), threads, **attributes).run(None, given)
    return found[0]  # type: ignore[no-any-return]


def routed(
    x: Float32, router: Float32, bias: Float32 | None, top_k: int, *, normalise: bool, threads: int = 1
) -> Float32:
    given = {"x": x[None], "router": pack_panels(router[None])} | ({} if bias is None else {"bias": bias})
    return run_kernel("Route", given, threads, experts=router.shape[1], top_k=top_k, normalise=int(normalise))


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
        return run_kernel(op, given, threads, **attributes)

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


def check_layer(shape: dict[str, Any], layer: Layer, rng: np.random.Generator) -> None:
    x = rng.normal(size=(shape["tokens"], layer.hidden)).astype(np.float32) * 4
    weights = weights_of(rng, shape["tokens"], shape["experts"], shape["top_k"], shape["spread"])
    np.testing.assert_array_equal(layer.run(x, weights, shape["threads"]), layer.reference(x, weights))


@given(SHAPES, st.sampled_from([1, 7, 16, 33, 64]), st.sampled_from([1, 5, 16, 17, 48]))
def test_float_experts_have_the_references_bits(shape, hidden, inner) -> None:
    rng = np.random.default_rng(shape["seed"])
    check_layer(shape, float_layer(rng, shape["experts"], hidden, inner, biased=shape["biased"]), rng)


@given(
    SHAPES, st.sampled_from([32, 64, 96]), st.sampled_from([32, 96, 160]), st.sampled_from([4, 8]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_quantised_experts_have_the_references_bits(shape, hidden, inner, bits, minimums, wide) -> None:
    rng = np.random.default_rng(shape["seed"])
    kind = {"biased": shape["biased"], "minimums": minimums, "wide": wide}
    check_layer(shape, quant_layer(rng, shape["experts"], hidden, inner, bits, **kind), rng)


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


def layer_of(rng: np.random.Generator, experts: int, hidden: int, inner: int, bits: int | None) -> Layer:
    if bits is None:
        return float_layer(rng, experts, hidden, inner)
    return quant_layer(rng, experts, hidden, inner, bits)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_token_has_the_same_bits_in_any_company_and_numbers_that_are_not_finite_spoil_it_alone(bits) -> None:
    rng = np.random.default_rng(3)
    experts, hidden, count = 6, 64, 300
    layer = layer_of(rng, experts, hidden, 96, bits)
    router = rng.normal(size=(hidden, experts)).astype(np.float32)
    x = rng.normal(size=(count, hidden)).astype(np.float32)

    def both(rows: Float32, threads: int = 1) -> Float32:
        return layer.run(rows, routed(rows, router, None, 2, normalise=True, threads=threads), threads)

    alone = np.concatenate([both(x[i : i + 1]) for i in range(count)])
    for rows in (*range(2, 36), 64, 65, count):
        np.testing.assert_array_equal(both(x[:rows], 1 + rows % 2), alone[:rows])
    np.testing.assert_array_equal(both(x[::-1].copy(), 2), alone[::-1])
    for value in (np.nan, np.inf, -np.inf):
        few = x[:9].copy()
        few[4, 7] = value
        found = both(few)
        assert not np.isfinite(found[4]).any()
        np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(alone[:9], 4, 0))
    none = x[:0]
    assert routed(none, router, None, 2, normalise=True).shape == (0, experts)
    assert layer.run(none, np.zeros((0, experts), np.float32)).shape == (0, hidden)


def test_inputs_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(0)
    x, router = np.zeros((2, 32), np.float32), np.zeros((32, 4), np.float32)
    layer, weights = float_layer(rng, 4, 32, 16), np.ones((2, 4), np.float32)
    packed = {f"packed.{i}": np.zeros(1, np.uint8) for i in range(3)}
    attributes = {
        "experts": 4,
        "hidden": 32,
        "size": 16,
        "bits": 4,
        "wide": 0,
        "minimums": 0,
        "alpha": 1.0,
        "limit": 0.0,
    }
    for run, words in (
        (lambda: routed(x, router, None, 5, normalise=True), "top_k is no number of experts"),
        (lambda: routed(x[:, 1:], router, None, 2, normalise=True), "extent"),
        (lambda: layer.run(x, weights[:1]), "other tokens"),
        (lambda: layer.run(x, weights[:, 1:]), "another number of experts"),
        (lambda: layer.run(x[:, 1:], weights), "another width"),
        (lambda: dataclasses.replace(layer, up=layer.up[1:]).run(x, weights), "extent"),
        (
            lambda: run_kernel(
                "QuantMixtureOfExperts", {"x": x[None], "weights": weights[None]} | packed, **attributes
            ),
            "multiples of 32",
        ),
    ):
        with pytest.raises(Exception, match=words):
            run()


def run_body(op: str, given: dict[str, Any], **attributes: Any) -> Float32:
    """Run one of our graph ops by its function body; all inputs but the first are constants."""
    (x, first), *constants = given.items()
    engine = body_session(op, ((x, FLOAT, 3),), (("y", FLOAT, 3),), dict(constants), **attributes)
    return engine.run(None, {x: first})[0][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("normalise", "biased"), [(False, True), (True, False)])
def test_the_body_of_route_chooses_the_same(normalise, biased) -> None:
    rng = np.random.default_rng(2)
    x, router = rng.normal(size=(30, 40)).astype(np.float32), rng.normal(size=(40, 9)).astype(np.float32)
    router[:, 5] = router[:, 2]  # equal logits
    bias = rng.integers(-1, 2, 9).astype(np.float32) if biased else None
    given = {"x": x[None], "router": router} | ({} if bias is None else {"bias": bias})
    found = run_body("BiasedRoute" if biased else "Route", given, top_k=3, normalise=int(normalise))
    np.testing.assert_allclose(found, route(x, router, bias, top_k=3, normalise=normalise), rtol=2e-5, atol=1e-7)
    np.testing.assert_array_equal(found != 0, route(x, router, bias, top_k=3, normalise=normalise) != 0)


@pytest.mark.parametrize(("bits", "biased"), [(None, False), (None, True), (4, True), (8, False)])
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
    found = run_body(name, {"x": x[None], "weights": weights[None]} | given, **attributes)
    wanted = layer.reference(x, weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_a_body_reads_nothing_of_an_expert_that_was_not_chosen() -> None:
    rng = np.random.default_rng(4)
    layer = float_layer(rng, 3, 8, 8)
    layer.gate[2] = np.inf
    x, weights = rng.normal(size=(4, 8)).astype(np.float32), weights_of(rng, 4, 3, 2, "same")
    given = {"x": x[None], "weights": weights[None], "gate": layer.gate, "up": layer.up, "down": layer.down}
    found = run_body("MixtureOfExperts", given)
    np.testing.assert_allclose(found, layer.reference(x, weights), rtol=1e-4, atol=1e-5)


def of_experts() -> Results:
    """Outputs of layers, which `test_other_processors.py` compares."""
    rng = np.random.default_rng(5)
    found: Results = {}
    for tokens, bits, biased in product((1, 3, 40), (None, 4, 8), (False, True)):
        if bits is None:
            layer = float_layer(rng, 5, 72, 40, biased=biased)
        else:
            layer = quant_layer(rng, 5, 96, 64, bits, biased=biased, minimums=biased, wide=bits == 8)
        x = rng.normal(size=(tokens, layer.hidden)).astype(np.float32) * 3
        router = rng.normal(size=(layer.hidden, 5)).astype(np.float32)
        weights = routed(x, router, rng.normal(size=5).astype(np.float32), 2, normalise=biased)
        found[f"experts' weights {tokens} {bits} {biased}"] = weights
        found[f"experts {tokens} {bits} {biased}"] = layer.run(x, weights, 2)
    return found
