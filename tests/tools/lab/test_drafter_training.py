"""All drafters from a tiny target: they learn, what is written is what was trained, and a stopped run continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.held_out import read_text
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import BlockDraft
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.plans.errors import CheckpointError
from outrider.tools.lab import train_reference
from outrider.tools.lab.reference import drafter, drafter_text, export
from outrider.tools.lab.reference.acceptance import continue_prompts
from outrider.tools.lab.reference.corpus import write_text
from outrider.tools.lab.reference.draft_model import ModelGeometry, distillation_loss, train_model
from outrider.tools.lab.reference.drafter import Lessons, prepare
from outrider.tools.lab.reference.dspark import BlockGeometry, block_drafts, block_loss, train_dspark
from outrider.tools.lab.reference.eagle3 import HeadGeometry, head_drafts, train_eagle3, unrolled_loss
from outrider.tools.lab.reference.export import write_block, write_decoder, write_eagle3
from outrider.tools.lab.reference.loop import Batch, Training
from outrider.tools.lab.reference.target import initialise, matrices
from tests.compiler.block_heads import load_block
from tests.compiler.eagle3_heads import load_eagle3
from tests.tools.lab.drafter_lessons import source_files, tiny_run, tiny_target, write_target

HEAD = HeadGeometry(hidden=12, intermediate=20, heads=3, kv_heads=1, head_dim=8, draft_vocab=100)
BLOCK = BlockGeometry(layers=1, intermediate=20, heads=2, kv_heads=1, head_dim=8, markov_rank=4, block_size=3)
MODEL = ModelGeometry(hidden=12, intermediate=20, heads=3, kv_heads=1, head_dim=8)
SECOND = 1 / 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    write_target(folder / "out", source_files())
    prompts = folder / "out" / "held_out.jsonl.gz"
    write_text("".join(f"{line}\n" for line in read_text(prompts).splitlines()[:3]), prompts)
    return folder


@pytest.fixture(scope="module")
def lessons(folder: Path) -> Lessons:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drafter.ROWS, "cpu", 8)
        patch.setattr(drafter_text, "PROMPT_LENGTHS", (448,))
        patch.setattr(drafter, "continue_prompts", partial(continue_prompts, new=16))
        found = prepare(tiny_run(folder, 0.0), source_files())
    return replace(found, windows=((0.0, 512),), step_tokens=512)


def test_no_held_out_text_is_learned_from(folder: Path, lessons: Lessons, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a held-out file nor a training file with the text of one."""
    files = source_files()
    held_out = [f for f in files if f.held_out]
    train = [f for f in files if not f.held_out]
    encode = lessons.teacher.tokenizer.encode
    assert len(lessons.streams[0]) == sum(len(encode(f.text).ids) + 1 for f in train)
    moved = replace(held_out[0], name=train[0].name)
    assert not moved.held_out
    monkeypatch.setattr(drafter, "continue_prompts", lambda *_: [])
    again = prepare(tiny_run(folder, 0.0), [*files, moved])
    assert len(again.streams[0]) == len(lessons.streams[0])


def loss_of(model: nn.Module, lessons: Lessons) -> float:
    """On one fixed batch."""
    lessons.text.reseed(7)
    ids = torch.from_numpy(lessons.text.batch(2, 512))
    with torch.no_grad():
        if isinstance(model, Eagle3Head):
            reading = lessons.teacher.read(ids[:, :-1], model.config.aux_layers)
            return float(unrolled_loss(model, lessons.teacher.model.embedding, ids, reading, 3))
        if isinstance(model, BlockHead):
            reading, draft = lessons.teacher.read(ids[:, :-1], model.config.aux_layers), of(model, lessons)
            return float(block_loss(draft, ids, reading, torch.arange(1, 500, 4)))
        assert isinstance(model, Decoder)
        return float(distillation_loss(model, ids, lessons.teacher.read(ids[:, :-1]).logits))


def train_head(folder: Path, lessons: Lessons, seconds: float, name: str) -> Eagle3Head:
    train_eagle3(tiny_run(folder, seconds * SECOND), lessons, HEAD, name, steps=3)
    return load_eagle3(folder / "out" / name, lessons.teacher.model.config)


def train_block_head(folder: Path, lessons: Lessons, seconds: float, name: str) -> BlockHead:
    train_dspark(tiny_run(folder, seconds * SECOND), lessons, BLOCK, name)
    return load_block(folder / "out" / name, lessons.teacher.model.config)


def of(head: BlockHead, lessons: Lessons) -> BlockDraft:
    return BlockDraft(head, lessons.teacher.model)


def train_draft_model(folder: Path, lessons: Lessons, seconds: float, name: str) -> Decoder:
    train_model(tiny_run(folder, seconds * SECOND), lessons, MODEL, name)
    return load_decoder(folder / "out" / name)


@pytest.mark.parametrize(
    "train",
    [train_head, *(pytest.param(each, marks=pytest.mark.long) for each in (train_block_head, train_draft_model))],
)
def test_a_drafter_lowers_its_loss_and_continues_from_its_checkpoint(
    folder: Path, lessons: Lessons, train: Callable[..., nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    name = train.__name__
    before = loss_of(train(folder, lessons, 0.0, name), lessons)
    first = torch.load(folder / "work" / f"{name}.pt", weights_only=True)
    assert first["step"] == 0
    after = loss_of(train(folder, lessons, 1.5, name), lessons)
    assert "resumed at step 0" in capsys.readouterr().out
    second = torch.load(folder / "work" / f"{name}.pt", weights_only=True)
    assert second["step"] > 0
    assert second["tokens"] == 512 * second["step"]
    assert after < before
    card = (folder / "out" / name / "README.md").read_text(encoding="utf-8")
    assert f"| steps | {second['step']} |" in card
    assert "| greedy, among 4 children |" in card
    with pytest.raises(CheckpointError, match="trained with another target"):
        train(folder, replace(lessons, teacher=replace(lessons.teacher, sha256="0")), 1.5, name)


def test_written_heads_draft_as_the_trained_ones(folder: Path, lessons: Lessons, tmp_path: Path) -> None:
    """Trained ones are of bf16 values, which a second writing keeps."""
    target, continuation = lessons.teacher.model.config, lessons.continuations[0]
    embedding = lessons.teacher.model.embedding
    head = train_head(folder, lessons, 0.0, "written")
    write_eagle3(head, 2048, tmp_path / "head")
    again = load_eagle3(tmp_path / "head", target)
    assert (again.config, again.config.aux_layers) == (head.config, (2, 4, 5))
    reading = lessons.teacher.read(continuation.ids[None], head.config.aux_layers, exact=True)
    drafts = [head_drafts(h, embedding)(continuation.ids, reading, 4) for h in (head, again)]
    assert torch.equal(*drafts)
    assert torch.isfinite(drafts[0]).sum(dim=-1).unique().tolist() == [100]
    block = train_block_head(folder, lessons, 0.5, "written-block")
    write_block(block, target, tmp_path / "block")
    of_block = load_block(tmp_path / "block", target)
    assert of_block.config == block.config
    assert block.config.mask_token_id == lessons.teacher.tokenizer.token_to_id("ÿ")
    assert all(torch.equal(*pair) for pair in zip(block.parameters(), of_block.parameters(), strict=True))
    drafts = [block_drafts(of(h, lessons))(continuation.ids, reading, 3) for h in (block, of_block)]
    assert torch.equal(*drafts)
    for name, layers in (("head", None), ("block", [1, 3, 4])):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["rope_theta"], config.get("target_layer_ids")) == (target.rope_theta, layers)
    names = load_file(tmp_path / "block" / "model.safetensors").keys()
    assert not {"embed_tokens.weight", "lm_head.weight"} & names
    model = train_draft_model(folder, lessons, 0.0, "written-model")
    write_decoder(model, tmp_path / "model")
    ids = continuation.ids.tolist()
    assert torch.equal(sequence_logits(load_decoder(tmp_path / "model"), ids), sequence_logits(model, ids))


def test_a_block_head_continues_from_another_of_its_geometry_alone(folder: Path, lessons: Lessons) -> None:
    trained = train_block_head(folder, lessons, 0.5, "first")
    start = folder / "out" / "first"
    train_dspark(tiny_run(folder, 0.0), lessons, BLOCK, "second", start)
    second = load_block(folder / "out" / "second", lessons.teacher.model.config)
    assert all(torch.equal(*pair) for pair in zip(trained.parameters(), second.parameters(), strict=True))
    assert f"continued from the head in `{start}`" in (folder / "out" / "second" / "README.md").read_text()
    for other, key in ((replace(BLOCK, markov_rank=5), "markov"), (replace(BLOCK, taps=(2, 4)), "taps")):
        with pytest.raises(CheckpointError, match=rf"another geometry \({key}\)"):
            train_dspark(tiny_run(folder, 0.0), lessons, other, "third", start)


def test_a_training_continues_where_its_checkpoint_was(tmp_path: Path) -> None:
    """Two runs of one step each, the second from the checkpoint, end where one run of two steps does."""
    ids = torch.randint(40, (32,), generator=torch.Generator().manual_seed(0))

    def training(name: str) -> tuple[Training, Callable[[float], Batch]]:
        torch.manual_seed(0)
        model = Decoder(tiny_target(40).config)
        initialise(model)
        found = Training(model, matrices(model), tmp_path / name)

        def take(progress: float) -> Batch:
            found.used += 1e6 * (found.step + 1 >= stop)  # the time is up once this step is done
            return Batch(distillation_loss(model, ids[None], torch.zeros(1, 31, 40)), 31, "")

        return found, take

    ends = []
    for name, stops in (("apart.pt", (1, 2)), ("whole.pt", (2,))):
        for stop in stops:
            found, take = training(name)
            assert found.resume("cpu") == (stop != stops[0])
            found.used = 30.0  # where the rate is constant
            found.run(tiny_run(tmp_path, 1.0), take, lambda: None)
        ends.append([p.detach() for p in found.model.parameters()])
        assert (found.step, found.tokens) == (2, 62)
    for apart, whole in zip(*ends, strict=True):
        torch.testing.assert_close(apart, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("part", ["eagle3", "dspark", "model"])
def test_what_does_not_fit_is_refused_before_the_target_writes_text(
    folder: Path, part: str, monkeypatch: pytest.MonkeyPatch, output: Callable[..., str]
) -> None:
    monkeypatch.setattr(export, "SIZE_LIMIT", 50_000)
    monkeypatch.setattr(train_reference, "prepare", lambda *given: pytest.fail("the text is written already"))
    said = output(train_reference.main, part, "--work", folder, "--out", folder / "out", status=2)
    assert "all reference weights together may take" in said
    assert "choose a smaller geometry" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eagle3", "--work", "FOLDER", "--out", "FOLDER"], "train the target"),
        (["--draft-vocab", "100"], "--draft-vocab is a drafter's"),
        (["dspark", "--hidden", "64"], "--hidden does not go with dspark"),
        (["eagle3", "--block-size", "7"], "--block-size goes with dspark alone"),
        (["all", "--name", "other"], "--name goes with eagle3, dspark or model"),
        (["dspark", "--heads", "4", "--kv-heads", "3"], "multiple of --kv-heads"),
        (["model", "--bits", "8"], "--bits goes with eagle3 and dspark: a draft model is written in floats"),
    ],
)
def test_options_that_a_part_does_not_have_are_refused(
    words: list[str], said: str, tmp_path: Path, output: Callable[..., str]
) -> None:
    given = (tmp_path if word == "FOLDER" else word for word in words)
    assert said in output(train_reference.main, *given, status=2)
