"""A small model whose layers differ in what the families of models differ in, as a graph and in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.compiler.export.execution import cache_outputs
from outrider.compiler.export.ops import branch_attention as attention_op
from outrider.compiler.export.target import trace_target
from outrider.compiler.models.decoder import RmsNorm, add_and_norm
from outrider.compiler.models.ops import gelu_unit, softcap
from outrider.plans import names
from outrider.plugins.ops.bim_mask import bim_mask
from outrider.plugins.ops.branch_attention import branch_attention
from outrider.plugins.ops.window_bias import window_bias
from tests.compiler.steps import Arrays, depths, flat

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 4, 2, 16, 97


@dataclass(frozen=True)
class Form:
    """What a layer's attention does beside attending. `rotated` numbers of a head are rotated, from the first on."""

    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    rotated: int = HEAD_DIM
    norms: bool = False


FORMS = {
    "gemma 2": (Form(window=3, softcap=5.0), Form(softcap=5.0), Form(window=3, softcap=5.0)),
    "gemma 3": (Form(window=2, norms=True), Form(window=2, norms=True), Form(norms=True)),
    "phi 3": (Form(rotated=12), Form(rotated=12, window=4)),
    "gpt-oss": (Form(window=3, sinks=True), Form(sinks=True)),
    "smollm 3": (Form(), Form(rotated=0), Form()),
    "norms without a rotation": (Form(norms=True, rotated=0), Form(norms=True, rotated=12)),
    "all at once": (Form(window=3, softcap=5.0, sinks=True, rotated=8, norms=True), Form(softcap=3.0, sinks=True)),
}


class Layer(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(HIDDEN, size, bias=False))
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, 48, bias=False) for _ in range(2))
        self.down = nn.Linear(48, HIDDEN, bias=False)
        self.sinks = nn.Parameter(torch.zeros(HEADS)) if form.sinks else None
        self.norms = nn.ModuleList(nn.RMSNorm(HEAD_DIM, eps=1e-6) for _ in range(2)) if form.norms else None


class Forms(nn.Module):
    """`forward` has the inputs and outputs of the target graph (`compiler/export/target.py`)."""

    def __init__(self, forms: Sequence[Form], capacity: int, *, queries: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forms, self.queries = tuple(forms), queries
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(form) for form in forms)
        self.norm = RmsNorm(HIDDEN, 1e-6)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape) * (1.0 if parameter.dim() == 1 else 0.25)
        for rotated in {form.rotated for form in forms} - {0}:
            angles = np.arange(capacity)[:, None] / 100.0 ** (np.arange(rotated // 2) * 2 / rotated)
            for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                self.register_buffer(f"{name}_{rotated}", torch.from_numpy(table.astype(np.float32)))

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        x, added = self.embedding(inputs[names.TOKEN_IDS].unsqueeze(0)), None
        presents: list[Tensor] = []
        queries: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            form = layer.form
            normed, x = add_and_norm(x, added, self.norm)
            q, k, v = (getattr(layer, name)(normed) for name in "qkv")
            cos, sin = (getattr(self, f"{x}_{form.rotated}") if form.rotated else None for x in ("cos", "sin"))
            q_norm, k_norm = (None, None) if layer.norms is None else (norm.weight for norm in layer.norms)
            out, k_out, v_out, asked = attention_op(
                q, k, v, inputs[names.k_cache(index)], inputs[names.v_cache(index)],
                *(inputs[name] for name in (names.ATTN_BIAS, names.PAST_LENGTH, names.ROW_SPLITS)),
                layer.sinks, inputs[names.POSITIONS].unsqueeze(0) if form.rotated else None, cos, sin, q_norm, k_norm,
                HEADS, KV_HEADS, HEAD_DIM**-0.5, 0, 1, form.softcap, form.window, 1e-6,
            )  # fmt: skip
            queries.append(asked)
            presents += (k_out, v_out)
            normed, x = add_and_norm(x, layer.o(out), self.norm)
            added = layer.down(gelu_unit(layer.gate(normed), layer.up(normed)))
        picked = torch.index_select(add_and_norm(x, added, None)[1], -2, inputs[names.LOGIT_INDICES]).squeeze(0)
        logits = softcap(self.head(self.norm(picked)).float(), 4.0)
        return logits, *presents, *(tuple(q.float() for q in queries) if self.queries else ())

    def in_numpy(self, feeds: Arrays) -> Arrays:
        """Give the graph's outputs by the ops' references; the caches as they are after the step."""
        weights = {name: value.detach().double().numpy() for name, value in self.state_dict().items()}
        x = weights["embedding.weight"][feeds["token_ids"]]
        found: Arrays = {}

        def norm(y: NDArray[Any], weight: NDArray[Any] | float) -> NDArray[Any]:
            return np.asarray(y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * weight)

        for i, form in enumerate(self.forms):
            own = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items()}
            q, k, v = (norm(x, weights["norm.weight"]) @ own[f"{name}.weight"].T for name in "qkv")
            ready = []
            for j, each in enumerate((q, k)):
                heads = each.reshape(len(x), -1, HEAD_DIM)
                if form.norms:
                    heads = norm(heads, own[f"norms.{j}.weight"])
                if form.rotated:
                    low, high, rest = np.split(heads, [form.rotated // 2, form.rotated], axis=-1)
                    cos, sin = (weights[f"{f}_{form.rotated}"][feeds["positions"], None] for f in ("cos", "sin"))
                    heads = np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)
                ready.append(heads.reshape(len(x), -1))
            bias = feeds["attn_bias"]
            found[names.queries(i)] = ready[0]
            given = {"q": ready[0], "k": ready[1], "v": v} | feeds | own
            given |= {"k_cache": feeds[names.k_cache(i)], "v_cache": feeds[names.v_cache(i)]}
            given |= {"attn_bias": window_bias(bias, form.window)} if form.window else {}
            out, *caches = branch_attention(
                given, num_heads=HEADS, kv_num_heads=KV_HEADS, scale=HEAD_DIM**-0.5, softcap=form.softcap
            )
            for name, cache in zip((names.k_cache(i), names.v_cache(i)), caches, strict=True):
                found[names.cache_output(name)] = cache
            x = x + out @ own["o.weight"].T
            gate, up = (norm(x, weights["norm.weight"]) @ own[f"{name}.weight"].T for name in ("gate", "up"))
            gelu = gate / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            x = x + gelu * up @ own["down.weight"].T
        logits = norm(x[feeds["logit_indices"]], weights["norm.weight"]) @ weights["head.weight"].T
        found[names.LOGITS_OUT] = 4.0 * np.tanh(logits / 4.0)
        return found


def export_forms(module: Forms, capacity: int) -> ir.Model:
    layers, cache = range(len(module.forms)), (names.ROWS, KV_HEADS, capacity, HEAD_DIM)
    outputs = {
        names.LOGITS_OUT: (names.LOGITS, VOCABULARY),
        **dict.fromkeys(cache_outputs(len(layers), 1), cache),
        **({names.queries(i): (names.NEW, HEADS * HEAD_DIM) for i in layers} if module.queries else {}),
    }
    return trace_target(module, cache, len(layers), module.head.weight.dtype, outputs, states={})


def random_step(forms: Sequence[Form], capacity: int, past: Sequence[int], parents: Sequence[Sequence[int]]) -> Arrays:
    """A step of rows with trees of new tokens, over caches that hold numbers everywhere."""
    random, rows = np.random.default_rng(1), len(past)
    new = [len(parent) for parent in parents]
    total, view = sum(new), max(p + n for p, n in zip(past, new, strict=True)) + 2
    splits = np.cumsum([0, *new])
    parent = flat([np.array(row, np.int64) for row in parents])
    bim = random.choice([-2, -1, -1, 0], (rows, capacity))
    bias = bim_mask(bim, np.array(past), splits, np.zeros(total, np.int64), parent, view, max(new))
    shape = (rows, KV_HEADS, capacity, HEAD_DIM)
    caches = {
        of(i): random.normal(size=shape).astype(np.float32)
        for i in range(len(forms))
        for of in (names.k_cache, names.v_cache)
    }
    return {
        "token_ids": random.integers(0, VOCABULARY, total),
        "positions": np.concatenate([depths(row, first) for row, first in zip(parents, past, strict=True)]),
        "row_splits": splits,
        "attn_bias": bias,
        "past_length": np.array(past, np.int64),
        "logit_indices": np.arange(total),
        **caches,
    }
