"""Context quality: losses against transformers, questions whose answers are known, figures counted by hand."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import RequestError
from outrider.tools.lab.context_quality.__main__ import main
from outrider.tools.lab.context_quality.figures import Answers, Row, best_shares, judge, loss_row, retrieval_row
from outrider.tools.lab.context_quality.held_out import Lines, documents, held_out_files
from outrider.tools.lab.context_quality.questions import Context, Contexts, Question
from outrider.tools.lab.context_quality.reading import answers, short_losses, token_losses
from outrider.tools.lab.reference.corpus import SourceFile, read_standard_library, write_file_list
from tests.conftest import REPOSITORY

RECIPE = """\
name: toy-long
target:
  checkpoint: target
  rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 256}
capacity: {context: 1024}
"""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
NAMES = [f"{first}{second}" for first in ("table", "queue", "shelf") for second in ("_row", "_key", "_end")]
LINES = (REPOSITORY / "LICENSE").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def recipe(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    shutil.copytree(toy_recipe.parent / "target", folder / "target")
    (folder / "model.yaml").write_text(RECIPE, encoding="utf-8")
    return folder / "model.yaml"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three held-out files that share names, one without, and training files."""
    folder = tmp_path_factory.mktemp("library")
    names = [f"file{number}.py" for number in range(300)]
    held_out = [name for name in names if SourceFile(name, "", "").held_out]
    for number, name in enumerate(held_out[:3]):
        own = [f"# {word}" for word in NAMES] + LINES[number * 30 : number * 30 + 30]
        (folder / name).write_text("\n".join(own) + "\n", encoding="utf-8")
    (folder / held_out[3]).write_text("x = 1", encoding="utf-8")
    for name in sorted(set(names) - set(held_out))[:5]:
        (folder / name).write_text("LEARNED = 'LEARNED'\n" * 50, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def configs(recipe: Path) -> dict[str, DecoderConfig]:
    loaded = load_recipe(recipe)
    return {
        "recipe": read_config(loaded.checkpoint_path, loaded.rope_scaling),
        "checkpoint": read_config(loaded.checkpoint_path),
    }


@pytest.fixture(scope="module")
def tokenizer(recipe: Path) -> Tokenizer:
    return Tokenizer.from_file(str(recipe.parent / "target" / "tokenizer.json"))


def oracle(recipe: Path, scaling: str) -> Qwen3ForCausalLM:
    rope = {"rope_parameters": YARN} if scaling == "recipe" else {}
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(recipe.parent / "target", **rope)
    return model.float().eval()


@torch.no_grad()
def oracle_losses(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    return cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")


def tokens(count: int) -> Tensor:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scaling", ["recipe", "checkpoint"])
def test_the_loss_is_that_of_transformers_behind_the_trained_length_too(
    recipe: Path, configs: dict[str, DecoderConfig], scaling: str
) -> None:
    ids, model = tokens(700), load_decoder(recipe.parent / "target")
    theirs = oracle(recipe, scaling)
    ours = token_losses(model, configs[scaling], ids[None])[0]
    torch.testing.assert_close(ours, oracle_losses(theirs, ids), atol=2e-3, rtol=1e-3)
    with torch.no_grad():
        assert float(ours.mean()) == pytest.approx(float(theirs(ids[None], labels=ids[None]).loss), abs=1e-4)


def test_the_scaling_makes_a_difference(recipe: Path, configs: dict[str, DecoderConfig]) -> None:
    ids, model = tokens(100), load_decoder(recipe.parent / "target")
    one, other = (token_losses(model, config, ids[None]) for config in configs.values())
    assert float((one - other).abs().max()) > 0.01


def test_short_windows_say_what_every_token_costs_behind_the_last_few(
    recipe: Path, configs: dict[str, DecoderConfig]
) -> None:
    ids, window = tokens(103), 20
    found = short_losses(load_decoder(recipe.parent / "target"), configs["checkpoint"], ids, window, batch=3)
    theirs = oracle(recipe, "checkpoint")
    assert found.shape == (102,)
    for index in (1, 9, 10, 19, 20, 29, 30, 95, 102):
        start = max(0, index // 10 * 10 - 10)
        alone = oracle_losses(theirs, ids[start : index + 1])[-1]
        torch.testing.assert_close(found[index - 1], alone, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("scaling", ["recipe", "checkpoint"])
def test_a_question_is_answered_where_greedy_decoding_says_so(
    recipe: Path, configs: dict[str, DecoderConfig], scaling: str
) -> None:
    """The context is longer than what the model was made for, and the answers are what transformers says after it."""
    ids = tokens(400).tolist()
    first, second, third = ids[300:310], ids[310:317], ids[317:321]
    theirs = oracle(recipe, scaling)

    def said(asked: Sequence[int], count: int) -> list[int]:
        found = [*ids[:300], *asked]
        for _ in range(count):
            with torch.no_grad():
                found.append(int(theirs(torch.tensor([found])).logits[0, -1].argmax()))
        return found[-count:]

    right, other = said(first, 4), said(third, 3)
    wrong = [*said(second, 3)[:-1], 299 - said(second, 3)[-1]]
    asked = [Question(0.1, first, right), Question(0.5, second, wrong), Question(0.9, third, [298, 5])]
    model = load_decoder(recipe.parent / "target")
    assert answers(model, configs[scaling], Context(ids[:300], asked)) == [0, None, None]
    asked[1] = replace(asked[1], answer=other)  # the third is given the second's answer
    assert answers(model, configs[scaling], Context(ids[:300], asked)) == [0, None, 1]


def test_documents_are_held_out_files_one_after_another(library: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = held_out_files(tmp_path / "target", library)
    assert len(files) == 4
    stream = [token for file in files for token in (*tokenizer.encode(file.text).ids, 0)]
    found = documents(tokenizer, files, (0,), 3, len(stream))
    starts = [0, len(stream) // 3, 2 * len(stream) // 3]
    assert found == [(stream + stream)[start : start + len(stream)] for start in starts]
    assert "LEARNED" not in tokenizer.decode(found[0])
    with pytest.raises(RequestError, match=f"--lengths has {len(stream) + 1}; the held-out files have {len(stream)}"):
        documents(tokenizer, files, (0,), 1, len(stream) + 1)


def test_text_that_the_model_learned_from_is_no_held_out_text(library: Path, tmp_path: Path) -> None:
    files = read_standard_library(library)
    same = next(file for file in files if file.held_out)
    other = next(file for file in files if not file.held_out)
    write_file_list([replace(other, sha256=same.sha256)], tmp_path / "corpus.txt.gz")
    found = held_out_files(tmp_path / "target", library)
    assert len(found) == 3
    assert same not in found


def test_lines_are_counted_in_tokens(library: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = held_out_files(tmp_path / "target", library)
    lines, before = Lines(tokenizer, files).stretch(400, random.Random(0))
    text = "\n".join(file.text.rstrip("\n") for file in files)
    assert "\n".join(lines) in text
    assert before[0] == 0
    for place in (1, 5, len(lines) - 1):
        alone = len(tokenizer.encode("\n".join(lines[:place]) + "\n").ids)
        assert before[place] == pytest.approx(alone, abs=2)
    assert len(tokenizer.encode("\n".join(lines)).ids) >= 398


@pytest.mark.parametrize("length", [300, 700])
def test_contexts_hold_every_needle_at_its_depth(
    library: Path, tokenizer: Tokenizer, tmp_path: Path, length: int
) -> None:
    files = held_out_files(tmp_path / "target", library)
    context = Contexts(tokenizer, Lines(tokenizer, files), NAMES, 3).make(length, seed=1)
    text = tokenizer.decode(context.ids)
    assert len(context.ids) + max(len(q.asked) + len(q.answer) for q in context.questions) == length
    assert text.startswith("<|im_start|>user\n")
    assert [round(question.depth, 3) for question in context.questions] == [0.167, 0.5, 0.833]
    for question in context.questions:
        asked, answer = tokenizer.decode(question.asked), tokenizer.decode(question.answer)
        alias = asked.removeprefix("\nWhich name was imported as ").partition("?")[0]
        assert asked.endswith("?<|im_end|>\n<|im_start|>assistant\n")
        assert answer.endswith("<|im_end|>")
        line = f"\nimport {answer.removesuffix('<|im_end|>')} as {alias}\n"
        assert text.count(line) == 1
        position = len(tokenizer.encode(text[: text.index(line)]).ids) / len(context.ids)
        assert position == pytest.approx(question.depth, abs=0.2 if length == 300 else 0.1)


def test_a_context_without_room_for_text_is_refused(library: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = Lines(tokenizer, held_out_files(tmp_path / "target", library))
    with pytest.raises(RequestError, match=r"--lengths has 100; 3 needles and a question take \d+ tokens"):
        Contexts(tokenizer, lines, NAMES, 3).make(100, seed=0)
    with pytest.raises(RequestError, match="--needles is 5; the held-out files have names for 4"):
        Contexts(tokenizer, lines, NAMES, 5)


def test_a_length_is_judged_by_its_second_half() -> None:
    losses, short = [torch.arange(1.0, 1024.0)] * 2, [torch.ones(1023)] * 2  # the token at position i costs i
    row = loss_row(512, losses, short)
    mean = sum(range(256, 512)) / 256
    assert (row["length"], row["tokens"], row["nats"], row["short_nats"]) == (512, 512, mean, 1.0)
    assert row["difference"] == mean - 1
    assert row["standard_error"] == 0  # both stretches are alike
    assert loss_row(64, losses, short)["standard_error"] is None
    assert loss_row(1024, losses, short)["standard_error"] == pytest.approx(
        128 / 3**0.5
    )  # two stretches a document, 256 apart


def test_questions_are_counted_by_depth() -> None:
    context = Context([], [Question(0.25, [], []), Question(0.75, [], [])])
    row = retrieval_row(64, [Answers(context, [0, 0]), Answers(context, [0, None]), Answers(context, [1, 1])])
    assert (row["questions"], row["right"], row["accuracy"], row["any_needle"]) == (6, 3, 0.5, 5)
    assert row["by_depth"] == [
        {"depth": 0.25, "questions": 3, "right": 2},
        {"depth": 0.75, "questions": 3, "right": 1},
    ]


def rows(name: str, values: dict[int, float]) -> list[Row]:
    return [{"length": length, name: value} for length, value in values.items()]


def test_out_of_its_depth_is_a_model_from_where_it_stays_so() -> None:
    loss = rows("difference", {8: 0.0, 16: 0.2, 32: -0.05, 64: 0.06, 128: 0.3})
    lengths = {8: (0.3, 0.2), 16: (0.8, 0.8), 32: (0.4, 0.3), 64: (0.5, 0.35), 128: (0.1, 0.1)}
    retrieval = [{"length": length, "any_share": a, "accuracy": b} for length, (a, b) in lengths.items()]
    best = best_shares(retrieval[:2])
    assert best == {"any_share": 0.8, "accuracy": 0.8}
    assert judge(loss, retrieval, best, 4) == {"by loss": 64, "by needles": 128, "by answers": 32, "from": 32}
    assert judge(loss[:3], retrieval[:2], best, 4)["from"] is None
    few = {"any_share": 0.8, "accuracy": 0.25}  # naming any one of four gives as many
    assert judge(loss, retrieval, few, 4) == {"by loss": 64, "by needles": 128, "by answers": None, "from": 64}
    assert best_shares([]) is None
    assert judge(loss[:3], retrieval, None, 4)["from"] is None


def test_the_command_prints_what_transformers_computes(
    recipe: Path, library: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [str(recipe), "--library", str(library), "--lengths", "300,700", "--documents", "2", "--contexts", "1"]
    assert main([*sizes, "--needles", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["context"], report["trained_length"], report["short_window"]) == (1024, 256, 300)
    assert report["machine"]["cores"] >= 1
    assert report["rope_scaling"]["recipe"]["kind"] == "yarn"
    lengths = {name: [row["length"] for row in rows] for name, rows in report["loss"].items()}
    assert lengths == {"recipe": [300, 700], "checkpoint": [300]}  # which goes to twice the trained length
    texts = documents(tokenizer, held_out_files(recipe.parent / "target", library), (0,), 2, 700)
    for scaling, length in (("recipe", 300), ("recipe", 700), ("checkpoint", 300)):
        theirs = [
            oracle_losses(oracle(recipe, scaling), torch.tensor(ids))[length // 2 - 1 : length - 1] for ids in texts
        ]
        row = next(row for row in report["loss"][scaling] if row["length"] == length)
        assert row["tokens"] == 2 * (length - length // 2)
        assert row["nats"] == pytest.approx(float(torch.cat(theirs).mean()), abs=1e-3)
    assert report["loss"]["checkpoint"][0]["difference"] == pytest.approx(0, abs=1e-4)
    assert [row["questions"] for row in report["retrieval"]["recipe"]] == [4, 2]
    assert report["best_within_training"] is None
    assert report["out_of_its_depth"]["recipe"]["by needles"] is None

    assert main([*sizes, "--needles", "2"]) == 0
    said = capsys.readouterr().out
    assert "with the recipe's scaling:" in said
    assert "the recipe's yarn x4, the checkpoint's none" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--lengths", "300,2048"), "--lengths has 2048; the recipe's context is 1024."),
        (("--lengths", "50"), "--lengths has 50; 3 needles and a question take"),
        (("--lengths", "300", "--needles", "50"), "--needles is 50; the held-out files have names for"),
        (("--lengths", "300", "--library", "nowhere"), "nowhere has no held-out file; name another"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    recipe: Path, library: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe), "--library", str(library), *arguments]) == 2
    assert said in capsys.readouterr().err
