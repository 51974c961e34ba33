"""The draft graph of block heads against blocks run one at a time in PyTorch, and trees grown from their definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.models.drafting import BlockDraft
from outrider.plans.manifest import Tree

from .block_heads import MASK, VOCAB, KeptContext, load_block, random_target, write_block
from .eagle3_heads import target_config
from .grouped_attention import CUDA, in_float32, norms_outside
from .test_draft_graph import CPU, RTX, DraftEngine, assert_grown, draft_of_head

DSPARK = {"layout": "deepspec", "markov": ("vanilla", 6)}
CHAIN = Tree(top_k=1, depth=3, nodes=5)
BUSHY = Tree(top_k=3, depth=2, nodes=9)
CASES: dict[str, tuple[dict[str, Any], Tree]] = {
    "dflash": ({"layout": "zlab"}, CHAIN),
    "dflash-tree": ({"layout": "zlab", "streams": (0, 3, 5, 7)}, BUSHY),
    "jetspec": ({"layout": "jetspec"}, CHAIN),
    "jetspec-short": ({"layout": "jetspec"}, Tree(top_k=1, depth=0, nodes=2)),  # fewer slots than the block has
    "jetspec-tree": ({"layout": "jetspec"}, BUSHY),
    "dspark": (DSPARK, Tree(top_k=1, depth=4, nodes=6)),
    "dspark-front": (DSPARK, Tree(top_k=1, depth=4, nodes=4)),
    "dspark-tree": (DSPARK, BUSHY),
    "dspark-gated-tree": (DSPARK | {"markov": ("gated", 6)}, BUSHY),
    "dspark-rnn": (DSPARK | {"markov": ("rnn", 6)}, CHAIN),
    "dspark-rnn-tree": (DSPARK | {"markov": ("rnn", 6)}, Tree(top_k=2, depth=3, nodes=12)),
    "dspark-confident": (DSPARK | {"confidence": "markov"}, CHAIN),
    "dspark-confident-tree": (DSPARK | {"confidence": "hidden"}, BUSHY),
    "speculators": ({"layout": "speculators-dspark", "draft_vocab": 25, "markov": ("rnn", 6)}, BUSHY),
}

SHORT = ("dflash-tree", "speculators")
"""With those of other backends, every layout, a bias with a state and one without, a confidence, chains and
trees; the others combine these."""


class BlockOracle:
    """One block after a context, and what its head says after any path of tokens."""

    def __init__(self, draft: BlockDraft, features: Tensor, tip: int) -> None:
        c = draft.head.config
        context = KeptContext(draft.head)
        context.keep(features)
        tokens = torch.tensor([tip] + [c.mask_token_id] * (c.block_size - 1))
        self.draft, self.tip = draft, tip
        self.hidden = context.block(draft.embed(tokens))[c.first_slot :]

    def scores(self, path: list[int]) -> tuple[Tensor, float | None]:
        """Logits after the tip and the target tokens in `path`, and the confidence of what is drafted there."""
        head, state, bias = self.draft.head, None, torch.zeros(())
        previous = torch.tensor([self.tip, *path])
        for slot in range(len(previous) if head.markov is not None else 0):
            state, bias = head.markov_bias(state, previous[slot], self.hidden[slot])
        here = self.hidden[len(path)]
        confidence = None
        if head.confidence_head is not None:
            confidence = float(torch.nn.functional.logsigmoid(head.confidence(here, previous[-1])))
        return self.draft.logits(here) + bias, confidence

    def log_probs(self, path: list[int]) -> NDArray[np.float64]:
        return torch.log_softmax(self.scores(path)[0].double(), -1).detach().numpy()


@pytest.fixture
def _grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    in_float32(monkeypatch)
    norms_outside(monkeypatch)


def _check(case: dict[str, Any], tree: Tree, target: str, folder: Path) -> None:
    write_block(folder / "head", **case)
    draft = BlockDraft(load_block(folder / "head", target_config()), random_target())
    engine = DraftEngine(draft, tree, folder / "engine", target=target, vocabulary=VOCAB)
    found, tokens, features = draft_of_head(engine, draft.feature_size, MASK)
    oracle = BlockOracle(draft, features, tokens[-1])
    chain = tree.top_k == 1 and draft.head.confidence_head is not None  # what the head says of the chain's tokens
    path_score = (lambda path: oracle.scores(path)[1] or 0.0) if chain else None
    assert_grown(found, tree, (oracle.tip, 14), oracle.log_probs, draft.head.target_ids.tolist(), path_score)


@pytest.mark.usefixtures("_grouped")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, CPU) for name in SHORT),
        ("jetspec-tree", CUDA),
        ("dspark-confident", RTX),
        *(pytest.param(name, CPU, marks=pytest.mark.long) for name in CASES if name not in SHORT),
        *(pytest.param(name, target, marks=pytest.mark.long) for name, target in (
            ("dflash", CUDA), ("dflash", RTX), ("jetspec-tree", RTX), ("dspark-confident", CUDA),
        )),
    ],
)  # fmt: skip
def test_the_tree_of_a_block_is_the_one_of_the_definition(name: str, target: str, tmp_path: Path) -> None:
    _check(*CASES[name], target, tmp_path)
