"""What a block drafter's folder must hold, what is read from it, and the sentence for each way in which it does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.compiler.deferred import deferred
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.drafting import BlockDraft

from .block_heads import (
    HIDDEN,
    LAYOUTS,
    UP,
    VOCAB,
    K,
    KeptContext,
    Layout,
    Q,
    defer_block,
    load_block,
    random_target,
    refused,
    write_block,
)
from .eagle3_heads import PICKLED, SAFETENSORS, change, target_config

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def test_the_same_weights_give_the_same_logits_in_every_layout(tmp_path: Path) -> None:
    """z-lab's heads with the target's embedding and output weights, the others' with copies of both."""
    target = random_target()
    assert target.lm_head is not None
    body = write_block(tmp_path / "zlab")
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head.weight.T.contiguous()}
    features, block = torch.randn(6, 48), torch.tensor([7, 59, 59, 59, 59])
    logits: dict[Layout, Tensor] = {}
    for layout in LAYOUTS:
        folder = tmp_path / layout
        write_block(folder, layout=layout, seed=1)
        save_file(body if layout in ("zlab", "jetspec") else body | copies, folder / SAFETENSORS)
        draft = BlockDraft(load_block(folder, target_config()), target)
        execution = KeptContext(draft.head)
        execution.keep(features)
        logits[layout] = draft.logits(execution.block(draft.embed(block)))
    for layout in ("deepspec", "speculators-dflash", "speculators-dspark"):
        torch.testing.assert_close(logits[layout], logits["zlab"])
    assert not torch.allclose(
        logits["jetspec"][:-1], logits["zlab"][:-1]
    )  # its last slot alone may see the whole block


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_in_the_type_and_layout_asked_for(dtype: WeightType, layout: Layout, tmp_path: Path) -> None:
    tensors = write_block(tmp_path, layout=layout, dtype=torch.bfloat16)
    head = load_block(tmp_path, target_config(), dtype)
    kind = getattr(torch, dtype)
    assert {p.dtype for p in head.parameters()} == {kind}
    assert all(p.is_contiguous() and not p.requires_grad and p.device.type == "cpu" for p in head.parameters())
    assert torch.equal(head.layers[0].q.weight, tensors[Q].T.to(kind))  # type: ignore[union-attr]
    assert torch.equal(head.target_ids, torch.arange(VOCAB))
    assert not head.training


def test_the_target_stands_in_for_the_copies_that_deepspec_stores(tmp_path: Path) -> None:
    """Copies of both, and neither, give the same logits."""
    target = random_target()
    assert target.lm_head is not None
    body = write_block(tmp_path, layout="deepspec", markov=("vanilla", 6), confidence="markov")
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head.weight.T.contiguous()}
    features, block = torch.randn(6, 48), torch.tensor([7, 59, 59, 59, 59])
    logits = []
    for tensors in (body | copies, {name: body[name] for name in body.keys() - copies.keys()}):
        save_file(tensors, tmp_path / SAFETENSORS)
        head = load_block(tmp_path, target_config())
        assert (head.embedding is None) == (head.lm_head is None) == (len(tensors) < len(body))
        execution, draft = KeptContext(head), BlockDraft(head, target)
        execution.keep(features)
        logits.append(draft.logits(execution.block(draft.embed(block))))
    torch.testing.assert_close(*logits)


def test_tables_of_tokens_are_looked_up_and_so_not_transposed(tmp_path: Path) -> None:
    tensors = write_block(tmp_path, layout="deepspec", markov=("gated", 6), confidence="markov")
    head = load_block(tmp_path, target_config())
    assert head.markov is not None
    assert head.embedding is not None
    assert torch.equal(head.embedding, tensors["embed_tokens.weight"])
    assert torch.equal(head.markov.embedding, tensors[W1])
    assert torch.equal(head.markov.output.weight, tensors[W2].T)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deferred_head_reads_what_a_loaded_one_has(layout: Layout, tmp_path: Path) -> None:
    dspark = layout in ("deepspec", "speculators-dspark")
    write_block(
        tmp_path,
        layout=layout,
        bias=True,
        markov=("rnn", 6) if dspark else None,
        confidence="markov" if dspark else None,
        draft_vocab=25 if layout.startswith("speculators") else None,
    )
    loaded, unread = (read(tmp_path, target_config(), "bfloat16") for read in (load_block, defer_block))
    stored = deferred(unread)
    parameters = dict(loaded.named_parameters())
    assert stored.keys() == parameters.keys()
    assert all(torch.equal(tensor.read(), parameters[name]) for name, tensor in stored.items())
    assert torch.equal(unread.target_ids, loaded.target_ids)
    assert unread.config == loaded.config
    assert not unread.training


def test_target_ids_come_from_the_map(tmp_path: Path) -> None:
    tensors = write_block(tmp_path, layout="speculators-dspark", draft_vocab=25, markov=("vanilla", 6))
    assert tensors[W1].shape == (VOCAB, 6)
    assert tensors[W2].shape == (25, 6)
    ids = load_block(tmp_path, target_config()).target_ids
    assert ids.dtype == torch.int64
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())
    change(tmp_path, lambda stored: [stored.pop("d2t"), stored.pop("t2d")])
    refused(tmp_path, "tensor 'd2t' is missing", "draft vocabulary (25)", "target's (60)")


def test_what_speculators_trains_against_is_let_pass(tmp_path: Path) -> None:
    tensors = write_block(tmp_path, layout="speculators-dflash", draft_vocab=25)
    of_training = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.zeros(25, HIDDEN)}
    save_file(tensors | of_training, tmp_path / SAFETENSORS)
    head = load_block(tmp_path, target_config())
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"].T)


HEADS = {"markov": ("rnn", 6), "confidence": "markov"}
SPECULATORS = "speculators-dspark"
CASES: list[tuple[str, str, tuple[int, ...] | torch.dtype | None, tuple[str, ...]]] = [
    *((layout, name, None, (f"{SAFETENSORS}: tensor '{name}' is missing", "shape [", "complete checkpoint"))
      for layout in ("zlab", SPECULATORS) for name in (UP, Q, K, "fc.weight", "hidden_norm.weight", "norm.weight")),
    *(("deepspec", name, None, (f"tensor '{name}' is missing",)) for name in (
        "embed_tokens.weight", "lm_head.weight", W1, "markov_head.joint_proj.bias", "confidence_head.proj.weight",
    )),
    *((SPECULATORS, name, None, (f"tensor '{name}' is missing",)) for name in (
        "lm_head.weight", W2, "confidence_head.proj.bias",
    )),
    *((layout, name, (32,), (f"tensor '{name}' is unexpected", "head in ", "config.json")) for layout, name in (
        *((layout, "layers.2.mlp.up_proj.weight") for layout in LAYOUTS),
        *((layout, "layers.0.self_attn.q_proj.bias") for layout in LAYOUTS),
        ("zlab", "embed_tokens.weight"),
        ("zlab", "lm_head.weight"),
        ("zlab", "d2t"),
        ("jetspec", "hidden_dim_adapter.proj.weight"),
        ("deepspec", "t2d"),
        ("speculators-dflash", W1),
        ("deepspec", "verifier_norm.weight"),
        ("speculators-dflash", "confidence_head.proj.weight"),
        ("speculators-dflash", "layers.0.self_attn.qkv_proj.weight"),
    )),
    *((SPECULATORS, name, shape, (f"tensor '{name}' has shape {list(shape)}", f"asks for {wanted}"))
      for name, shape, wanted in (
        ("fc.weight", (16, 32), "[16, 48]"),
        ("hidden_norm.weight", (17,), "[16]"),
        (Q, (64, 16), "[32, 16]"),
        ("layers.1.self_attn.k_norm.weight", (16,), "[8]"),
        ("lm_head.weight", (60, 16), "[25, 16]"),
        (W1, (25, 6), "[60, 6]"),
        (W2, (60, 6), "[25, 6]"),
        ("markov_head.joint_proj.weight", (18, 22), "[18, 28]"),
        ("confidence_head.proj.weight", (1, 16), "[1, 22]"),
        ("d2t", (24,), "[25]"),
    )),
    ("zlab", UP, torch.int8, (f"tensor '{UP}' is stored as I8, expected F64, F32, F16, BF16",)),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "name", "edit", "words"), CASES)
def test_what_is_wrong_with_a_tensor_is_named(
    layout: Layout, name: str, edit: tuple[int, ...] | torch.dtype | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    heads: Any = HEADS if layout in ("deepspec", SPECULATORS) else {}
    stored = write_block(tmp_path, layout=layout, draft_vocab=25 if layout == SPECULATORS else None, **heads)
    if edit is None:
        change(tmp_path, lambda tensors: tensors.pop(name))
    else:
        found = stored.get(name, torch.zeros(1))
        value = found.to(edit) if isinstance(edit, torch.dtype) else torch.zeros(edit, dtype=found.dtype)
        change(tmp_path, lambda tensors: tensors.update({name: value}))
    refused(tmp_path, *words)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """speculators leaves copies of the target's weights at NaN until it has loaded them."""
    write_block(tmp_path, layout="speculators-dflash")
    change(tmp_path, lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    with pytest.raises(Exception, match=re.escape("'lm_head.weight' holds values that are not finite in float32")):
        load_block(tmp_path, target_config())


def test_folder_without_weights_or_config(tmp_path: Path) -> None:
    refused(tmp_path / "absent", f"{tmp_path / 'absent'} is not a folder")
    refused(tmp_path, f"{tmp_path / 'config.json'} does not exist")
    write_block(tmp_path)
    (tmp_path / SAFETENSORS).rename(tmp_path / PICKLED)
    refused(tmp_path, f"{tmp_path} holds {PICKLED} but no {SAFETENSORS}; pickled weights are not read")
