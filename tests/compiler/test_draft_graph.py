"""Draft graphs of models and of block heads against trees that plain Python grows from their definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.export import DraftOptions, export_draft
from outrider.compiler.lowering import lower
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import BlockDraft, DecoderDraft, Eagle3Draft
from outrider.compiler.models.eager import CausalExecution, sequence_logits
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.plans import names
from outrider.plans.manifest import Tree
from outrider.plans.sampling import Sampling
from outrider.plugins.ops.bim_mask import bim_mask
from tests.compiler.steps import CUDA, in_float32, norms_outside, write_engine
from tests.cpu_session import cpu_session

from .block_heads import MASK, VOCAB, KeptContext, load_block, random_target, write_block
from .eagle3_heads import load_eagle3, target_config, write_eagle3

CPU, RTX = "onnxruntime-cpu", "tensorrt-rtx"
CAPACITY = 256
VOCABULARY = 300


class Node(NamedTuple):
    """A candidate of the definition: a token, the log-probability from the root on, and where it hangs."""

    token: int
    score: float
    path: list[int]
    parent: int


LogProbs = Callable[[list[int]], NDArray[np.float64]]
"""Of the drafter's tokens, after the tip and a path of drafted tokens."""


def grow(log_probs: LogProbs, tree: Tree) -> list[tuple[int, int, int, float, int]]:
    """(token, parent node, depth, score, row) of the nodes after the root, by the definition of the tree.

    Row r is the r-th node that a level runs; -1 where none does.
    """
    candidates: list[Node] = []
    ran: list[int] = []

    def expand(parent: int, path: list[int], score: float) -> list[int]:
        found, first = log_probs(path), len(candidates)
        best = sorted(range(len(found)), key=lambda t: (-found[t], t))[: tree.top_k]
        candidates.extend(Node(token, score + found[token], [*path, token], parent) for token in best)
        return [*range(first, len(candidates))]

    def likeliest(indices: Iterable[int], count: int) -> list[int]:
        return sorted(indices, key=lambda i: (-candidates[i].score, i))[:count]

    frontier = expand(-1, [], 0.0)
    for _ in range(tree.depth):
        ran += frontier
        level = [made for index in frontier for made in expand(index, candidates[index].path, candidates[index].score)]
        frontier = likeliest(level, tree.top_k)
    chosen = sorted(likeliest(range(len(candidates)), tree.nodes - 1))
    node_of = {-1: 0} | {index: node for node, index in enumerate(chosen, start=1)}
    nodes = [(candidates[i], ran.index(i) if i in ran else -1) for i in chosen]
    return [(each.token, node_of[each.parent], len(each.path), each.score, row) for each, row in nodes]


def assert_grown(
    found: dict[str, NDArray[Any]],
    tree: Tree,
    tip: tuple[int, int],
    log_probs: LogProbs,
    target_ids: Sequence[int] = range(VOCABULARY),
    path_score: Callable[[list[int]], float] | None = None,
) -> None:
    """What was found after the `tip`, a token and its place, is the tree of the definition.

    `log_probs` are of the drafter's tokens, after a path of the target's; `path_score`, for a chain, replaces the
    scores that its tokens were chosen by.
    """
    grown = grow(lambda path: log_probs([target_ids[t] for t in path]), tree)
    token, parent, depth, score, row = map(np.array, zip(*grown, strict=True))
    tokens = [target_ids[t] for t in token]
    if path_score is not None:
        score = np.cumsum([path_score(tokens[:place]) for place in range(len(tokens))])
    np.testing.assert_array_equal(found[names.TREE_TOKEN_IDS], [tip[0], *tokens])
    np.testing.assert_array_equal(found[names.TREE_PARENT], [-1, *parent])
    np.testing.assert_array_equal(found[names.TREE_POSITIONS], tip[1] + np.array([0, *depth]))
    np.testing.assert_allclose(found[names.TREE_SCORE], [0.0, *score], atol=1e-4)
    if names.TREE_SLOTS in found:
        np.testing.assert_array_equal(found[names.TREE_SLOTS], [-1, *row])
        assert (row[parent[parent > 0] - 1] >= 0).all(), "what has a child"


def draft_of_head(
    engine: DraftEngine, feature_size: int, vocabulary: int
) -> tuple[dict[str, NDArray[Any]], list[int], torch.Tensor]:
    """A draft after 14 pairs, which two passes compute, the second over KV of the first; the tokens and features."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, vocabulary, 15).tolist()
    features = random.normal(size=(20, feature_size)).astype(np.float32)
    rows = random.permutation(20)[:14]  # features lie anywhere in the target's step
    engine.draft(tokens[1:9], 0, features=features, feature_indices=rows[:8])
    found = engine.draft(tokens[9:], 8, features=features, feature_indices=rows[8:])
    return found, tokens, torch.from_numpy(features[rows])


class DraftEngine:
    """The lowered graph under ONNX Runtime, on one KV cache that every pass appends to in place."""

    def __init__(
        self,
        model: Any,
        tree: Tree,
        folder: Path,
        *,
        slots: bool = False,
        target: str = CPU,
        vocabulary: int = VOCABULARY,
    ) -> None:
        graph = export_draft(model, tree, CAPACITY, vocabulary, DraftOptions(slots=slots))
        self.reports = lower("draft", graph, target, rows=1)
        self.engine = write_engine(graph, folder, "draft")
        self._session = cpu_session(folder / "draft.onnx")
        self.caches = {
            t.name: np.zeros([int(d) for d in t.shape], np.float32) for t in self.engine.inputs if "cache" in t.name
        }
        self._tree, self._vocabulary = tree, vocabulary

    def draft(self, tokens: list[int], past: int, **more: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Feed `tokens`, a chain after `past` slots, and draft after the last one."""
        n = len(tokens)
        keys = past + n + max(self._tree.depth * self._tree.top_k, 8)  # a block of at most 8
        view = min(-(-keys // 32) * 32, CAPACITY)
        chain = np.arange(n) - 1
        lengths, splits = np.array([past]), np.array([0, n])
        bias = bim_mask(np.full((1, CAPACITY), -1), lengths, splits, np.zeros(n, np.int64), chain, view, n)
        feeds: dict[str, NDArray[Any]] = {
            names.TOKEN_IDS: np.array(tokens),
            names.POSITIONS: np.arange(past, past + n),
            names.ROW_SPLITS: splits,
            names.ATTN_BIAS: bias,
            names.PAST_LENGTH: lengths,
            names.NOISE: np.ones((1, self._tree.depth + 1, self._vocabulary), np.float32),
            names.DRAFT_SAMPLING: np.array([Sampling()], np.float32),
            **more,
        }
        read = {tensor.name for tensor in self.engine.inputs}
        feeds = {name: array for name, array in feeds.items() if name in read}
        binding, outputs = self._session.io_binding(), {}
        for name, array in {**feeds, **self.caches}.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for tensor in self.engine.outputs:
            source = self.engine.aliases.get(tensor.name)
            shape = [int(d) for d in tensor.shape]
            array = self.caches[source] if source else np.zeros(shape, tensor.dtype.numpy)
            outputs[tensor.name] = array
            binding.bind_output(tensor.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding)
        return outputs


def applied(engine: DraftEngine) -> Counter[str]:
    return Counter({report.rule: report.applied for report in engine.reports})


@pytest.fixture
def _grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """GroupQueryAttention, where it is lowered for CUDA."""
    in_float32(monkeypatch)
    norms_outside(monkeypatch)


@pytest.fixture(scope="module")
def decoder(toy_recipe: Path) -> Decoder:
    return load_decoder(toy_recipe.parent / "target", "float32", None)


PROMPT = [(37 * i) % 299 + 1 for i in range(21)]


@pytest.mark.parametrize(
    "tree",
    [
        Tree(top_k=2, depth=1, nodes=7),  # every candidate
        Tree(top_k=3, depth=3, nodes=20),
        *(
            pytest.param(Tree(top_k=top_k, depth=depth, nodes=nodes), marks=pytest.mark.long)
            for top_k, depth, nodes in ((1, 0, 2), (1, 4, 6), (3, 0, 3), (4, 3, 9), (10, 5, 60), (3, 6, 40))
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_grouped")
@pytest.mark.parametrize("target", [CPU, CUDA, pytest.param(RTX, marks=pytest.mark.long)])
def test_the_tree_is_the_one_of_the_definition(decoder: Decoder, tree: Tree, target: str, tmp_path: Path) -> None:
    engine = DraftEngine(DecoderDraft(decoder), tree, tmp_path, slots=tree.depth > 0, target=target)
    assert engine.engine.keeps_levels == (target != RTX and tree.depth > 0)
    assert applied(engine)["GroupQueryAttention"] == (
        decoder.config.num_layers * (1 + tree.depth) if target == CUDA else 0
    )
    engine.draft(PROMPT[:9], 0)
    engine.draft(PROMPT[9:17], 9)  # rows of the tree before are written over
    found = engine.draft(PROMPT[17:], 17)

    def log_probs(path: list[int]) -> NDArray[np.float64]:
        return torch.log_softmax(sequence_logits(decoder, PROMPT + path)[-1].double(), -1).numpy()

    assert_grown(found, tree, (PROMPT[-1], len(PROMPT) - 1), log_probs)
    assert (names.TREE_SLOTS in found) == (tree.depth > 0)


def test_the_row_of_a_node_is_that_of_feeding_its_path(decoder: Decoder, tmp_path: Path) -> None:
    """But for the last bits, which depend on how many tokens are computed at once."""
    engine = DraftEngine(DecoderDraft(decoder), Tree(top_k=3, depth=3, nodes=20), tmp_path, slots=True)
    found = engine.draft(PROMPT, 0)
    drafted = {name: cache.copy() for name, cache in engine.caches.items()}
    paths: list[list[int]] = [[]]
    for token, parent in zip(found[names.TREE_TOKEN_IDS][1:], found[names.TREE_PARENT][1:], strict=True):
        paths.append([*paths[parent], int(token)])
    placed = [(path, row) for path, row in zip(paths, found[names.TREE_SLOTS].tolist(), strict=True) if row >= 0]
    assert {len(path) for path, _ in placed} == {1, 2, 3}
    for path, row in placed:
        engine.draft(PROMPT + path, 0)
        for name, cache in engine.caches.items():
            fed = cache[:, :, len(PROMPT) + len(path) - 1]
            np.testing.assert_allclose(drafted[name][:, :, len(PROMPT) + row], fed, atol=1e-5)


# An EAGLE3 head: the same tree, on hidden states of its own, over a vocabulary of its own.


class HeadOracle:
    """The head in plain PyTorch over whole sequences: nothing is cached, nothing is appended in place."""

    def __init__(self, head: Eagle3Head, embedding: torch.Tensor) -> None:
        self.head = head
        self.embedding = embedding if head.embedding is None else head.embedding

    def run(self, features: torch.Tensor, tokens: list[int], path: list[int]) -> NDArray[np.float64]:
        """Log-probabilities of draft tokens after `tokens` (the last is the tip) and the target tokens in `path`.

        `features` `[len(tokens) - 1, 3H]`. Each pass of the recursion runs over everything before it again.
        """
        hidden = self.head.fuse(features)
        embedded = F.embedding(torch.tensor(tokens[1:]), self.embedding)
        for token in [*path, None]:
            execution = CausalExecution(self.head.config, 1, len(hidden), "cpu")
            normed, out = self.head.layer(hidden, embedded, execution)
            if token is None:
                return torch.log_softmax(self.head.logits(normed[-1]).double(), -1).detach().numpy()
            hidden = torch.cat([hidden, out[-1:]])
            embedded = torch.cat([embedded, F.embedding(torch.tensor([token]), self.embedding)])
        raise AssertionError


@pytest.mark.parametrize(
    "tree",
    [Tree(top_k=4, depth=2, nodes=10), pytest.param(Tree(top_k=3, depth=5, nodes=24), marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.usefixtures("_grouped")
@pytest.mark.parametrize(
    ("draft_vocab", "target"), [(None, CPU), pytest.param(33, CPU, marks=pytest.mark.long), (33, CUDA), (33, RTX)]
)
def test_the_tree_of_a_head_is_the_one_of_the_definition(
    tree: Tree, draft_vocab: int | None, target: str, tmp_path: Path
) -> None:
    config = target_config()
    write_eagle3(tmp_path / "head", draft_vocab=draft_vocab, layout="angelslim", hidden=24)
    head = load_eagle3(tmp_path / "head", config)
    model = Eagle3Draft(head, torch.nn.Parameter(torch.zeros(60, 24), requires_grad=False))
    engine = DraftEngine(model, tree, tmp_path / "engine", target=target, vocabulary=60)
    assert applied(engine)["GroupQueryAttention"] == (1 + tree.depth if target == CUDA else 0)
    found, tokens, given = draft_of_head(engine, config.hidden_size * 3, 60)
    ids, oracle = head.target_ids.tolist(), HeadOracle(head, model.embedding)
    assert_grown(found, tree, (tokens[-1], 14), lambda path: oracle.run(given, tokens, path), ids)


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
