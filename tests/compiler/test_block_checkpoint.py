"""What a block drafter's folder must hold, what is read from it, and the sentence for each way in which it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.compiler.deferred import deferred
from outrider.compiler.models.drafting import BlockDraft
from outrider.plans.errors import CheckpointError

from .block_heads import (
    HIDDEN,
    LAYOUTS,
    UP,
    VOCAB,
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
    """With the target's embedding and output weights, as z-lab, or with copies of both; DeepSpec either way."""
    target = random_target()
    assert target.lm_head is not None
    body = write_block(tmp_path / "zlab")
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head.weight.T.contiguous()}
    features, block = torch.randn(6, 48), torch.tensor([7, 59, 59, 59, 59])

    def logits(layout: Layout, tensors: dict[str, Tensor]) -> Tensor:
        write_block(tmp_path / layout, layout=layout, seed=1)
        save_file(tensors, tmp_path / layout / SAFETENSORS)
        head = load_block(tmp_path / layout, target_config())
        assert (head.embedding is None) == (head.lm_head is None) == (tensors is body)
        execution, draft = KeptContext(head), BlockDraft(head, target)
        execution.keep(features)
        return draft.logits(execution.block(draft.embed(block)))

    wanted = logits("zlab", body)
    torch.testing.assert_close(logits("deepspec", body), wanted)
    for layout in ("deepspec", "speculators-dflash", "speculators-dspark"):
        torch.testing.assert_close(logits(layout, body | copies), wanted)  # type: ignore[arg-type]
    assert not torch.allclose(logits("jetspec", body)[:-1], wanted[:-1])  # its last slot alone sees the whole block


def test_weights_are_in_the_type_and_layout_asked_for(tmp_path: Path) -> None:
    """Tables of tokens are looked up, and so not transposed."""
    tensors = write_block(tmp_path, layout="deepspec", dtype=torch.bfloat16, markov=("gated", 6), confidence="markov")
    for dtype in ("float32", "float16", "bfloat16"):
        head, kind = load_block(tmp_path, target_config(), dtype), getattr(torch, dtype)  # type: ignore[arg-type]
        assert {p.dtype for p in head.parameters()} == {kind}
        assert all(p.is_contiguous() and not p.requires_grad and p.device.type == "cpu" for p in head.parameters())
        assert torch.equal(head.layers[0].q.weight, tensors[Q].T.to(kind))  # type: ignore[union-attr]
        assert head.markov is not None
        assert head.embedding is not None
        assert torch.equal(head.embedding, tensors["embed_tokens.weight"].to(kind))
        assert torch.equal(head.markov.embedding, tensors[W1].to(kind))
        assert torch.equal(head.markov.output.weight, tensors[W2].T.to(kind))
        assert torch.equal(head.target_ids, torch.arange(VOCAB))
        assert not head.training


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


def test_target_ids_come_from_the_map_and_what_speculators_trains_against_is_let_pass(tmp_path: Path) -> None:
    tensors = write_block(tmp_path, layout="speculators-dspark", draft_vocab=25, markov=("vanilla", 6))
    assert (tensors[W1].shape, tensors[W2].shape) == ((VOCAB, 6), (25, 6))
    of_training = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.zeros(25, HIDDEN)}
    save_file(tensors | of_training, tmp_path / SAFETENSORS)
    head = load_block(tmp_path, target_config())
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"].T)
    assert head.target_ids.dtype == torch.int64
    assert torch.equal(head.target_ids, tensors["t2d"].nonzero().flatten())
    change(tmp_path, lambda stored: [stored.pop("d2t"), stored.pop("t2d")])
    refused(tmp_path, "tensor 'd2t' is missing", "draft vocabulary (25)", "target's (60)")


HEADS = {"markov": ("rnn", 6), "confidence": "markov"}
SPECULATORS = "speculators-dspark"
CASES: list[tuple[str, str, tuple[int, ...] | None, tuple[str, ...]]] = [
    ("zlab", UP, None, (f"{SAFETENSORS}: tensor '{UP}' is missing", "shape [", "complete checkpoint")),
    *((layout, name, None, (f"tensor '{name}' is missing",)) for layout, name in (
        (SPECULATORS, "lm_head.weight"), (SPECULATORS, W2), ("deepspec", "embed_tokens.weight"), ("deepspec", W1),
        ("deepspec", "confidence_head.proj.weight"),
    )),
    *((layout, name, (32,), (f"tensor '{name}' is unexpected", "head in ", "config.json")) for layout, name in (
        ("zlab", "layers.0.self_attn.q_proj.bias"), ("zlab", "embed_tokens.weight"), ("jetspec", "d2t"),
        ("deepspec", "verifier_norm.weight"), ("speculators-dflash", W1),
    )),
    *((SPECULATORS, name, shape, (f"tensor '{name}' has shape {list(shape)}", f"asks for {wanted}"))
      for name, shape, wanted in (
        ("fc.weight", (16, 32), "[16, 48]"), (W1, (25, 6), "[60, 6]"), (W2, (60, 6), "[25, 6]"),
        ("markov_head.joint_proj.weight", (18, 22), "[18, 28]"), ("confidence_head.proj.weight", (1, 16), "[1, 22]"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "name", "edit", "words"), CASES)
def test_what_is_wrong_with_a_tensor_is_named(
    layout: Layout, name: str, edit: tuple[int, ...] | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    heads: Any = HEADS if layout in ("deepspec", SPECULATORS) else {}
    write_block(tmp_path, layout=layout, draft_vocab=25 if layout == SPECULATORS else None, **heads)
    if edit is None:
        change(tmp_path, lambda tensors: tensors.pop(name))
    else:
        change(tmp_path, lambda tensors: tensors.update({name: torch.zeros(edit)}))
    refused(tmp_path, *words)


def test_pickled_weights_and_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """speculators leaves copies of the target's weights at NaN until it has loaded them."""
    write_block(tmp_path, layout="speculators-dflash")
    change(tmp_path, lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' holds values that are not finite in float32"):
        load_block(tmp_path, target_config())
    (tmp_path / SAFETENSORS).rename(tmp_path / PICKLED)
    refused(tmp_path, f"{tmp_path} holds {PICKLED} but no {SAFETENSORS}; pickled weights are not read")
