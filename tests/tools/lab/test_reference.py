"""The reference target is what it claims to be, and its tasks have the format later parts rely on."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import random
import re
import sysconfig
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from transformers import AutoConfig, AutoTokenizer

from outrider import Runtime
from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.held_out import read_text
from outrider.tools.lab import train_reference
from outrider.tools.lab.reference.corpus import DIGITS, SourceFile, read_file_list, read_standard_library
from outrider.tools.lab.reference.export import write_tokenizer
from outrider.tools.lab.reference.prompts import TASKS, read_completions
from outrider.tools.lab.reference.tasks import outline_examples, retrieval_example
from tests.conftest import REPOSITORY

REFERENCE = REPOSITORY / "plans" / "reference"
POINT = re.compile(r"^(\d+)\.<(\d+)><(\w+)>\[-\](.+)$")
MODULE = '''"""Reading and writing of simple tables."""

def read(path):
    """Read a table."""
    return open(path).read()


def write(path, rows):
    """Write a table."""
    open(path, "w").write(str(rows))
'''


def rows_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_text(REFERENCE / file).splitlines()]


def test_the_target_has_the_promised_size_and_family() -> None:
    config = AutoConfig.from_pretrained(REFERENCE / "target")
    parameters = sum(p.numel() for p in load_decoder(REFERENCE / "target").parameters())
    assert config.model_type == "qwen3"
    assert config.num_hidden_layers >= 8
    assert 8e6 <= parameters <= 12e6
    assert LibraryTokenizer.from_file(str(REFERENCE / "target" / "tokenizer.json")).get_vocab_size() == 4096
    assert sum(f.stat().st_size for f in (REFERENCE / "target").iterdir()) <= 22e6


def test_the_tokenizer_stays_as_short_as_an_export_writes_it(tmp_path: Path) -> None:
    path = REFERENCE / "target" / "tokenizer.json"
    tokenizer = LibraryTokenizer.from_file(str(path))
    write_tokenizer(tokenizer, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert LibraryTokenizer.from_file(str(tmp_path / "again.json")).to_str() == tokenizer.to_str()


def test_transformers_tokenizes_held_out_text_as_the_runtime_does(reference: Runtime) -> None:
    theirs = AutoTokenizer.from_pretrained(REFERENCE / "target")
    for row in rows_of("held_out.jsonl.gz"):
        ids = reference.tokenizer.encode(row["prompt"])
        assert theirs(row["prompt"])["input_ids"] == ids
        assert reference.tokenizer.decode(ids) == row["prompt"]
    messages = [{"role": "user", "content": "Base64"}]
    assert reference.tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_no_held_out_prompt_comes_from_a_training_file_and_calibration_text_does() -> None:
    held_out = {file.name: file.held_out for file in read_file_list(REFERENCE / "corpus.txt.gz")}
    for file, expected in (("held_out.jsonl.gz", True), ("calibration.jsonl.gz", False)):
        assert {held_out[row["file"]] for row in rows_of(file)} == {expected}
    assert len(held_out) > 21 * sum(held_out.values())
    assert all(SourceFile(name, "other text", "0").held_out == is_held_out for name, is_held_out in held_out.items())


def test_lists_only_writes_the_hash_of_every_file_and_the_prompts(tmp_path: Path) -> None:
    train_reference.main(["--lists-only", "--out", str(tmp_path / "new")])
    listed = tmp_path / "new" / "corpus.txt.gz"
    assert json.loads(read_text(listed).split("\n")[0])["python"] == platform.python_version()
    assert listed.read_bytes()[3:8] == bytes(5)  # neither a name nor a time: the same text, the same bytes
    root = Path(sysconfig.get_paths()["stdlib"])
    files = list(read_file_list(listed))
    assert {(f.name, f.sha256, f.held_out) for f in files} == {
        (f.name, f.sha256, f.held_out) for f in read_standard_library()
    }
    assert len(files) > 300
    for file in files[::50]:
        assert file.sha256 == hashlib.sha256((root / file.name).read_bytes()).hexdigest()[:DIGITS]
    prompts = read_text(tmp_path / "new" / "held_out.jsonl.gz").splitlines()
    assert Counter(json.loads(line)["task"] for line in prompts) == {"completion": 60, "docstring": 20, "long": 12}
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "corpus.txt.gz", "held_out.jsonl.gz", "calibration.jsonl.gz",
    }  # fmt: skip


def test_prompts_have_the_form_of_their_task_and_the_first_are_completions(reference: Runtime) -> None:
    """`outrider verify` and `tune` take the first few, whose figures the repository keeps."""
    rows = rows_of("held_out.jsonl.gz")
    assert (REFERENCE / "held_out.jsonl.gz").stat().st_size < 300_000
    assert [row["task"] for row in rows] == sorted(row["task"] for row in rows)  # completion, docstring, long
    tokens = {task: [len(reference.tokenizer.encode(r["prompt"])) for r in rows if r["task"] == task] for task in TASKS}
    assert min(tokens["long"]) > 2 * max(tokens["completion"])
    assert sum(length > 1500 for length in tokens["long"]) >= 4
    assert max(tokens["long"]) + 1024 < reference.manifest.target.context
    for row in (row for row in rows if row["task"] == "docstring"):
        function = ast.parse(textwrap.dedent(row["prompt"])).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function)
        assert len(function.body) == 1
    assert len(read_completions(REFERENCE / "held_out.jsonl.gz")) == 60


def test_an_outline_is_a_plan_and_one_branch_per_point() -> None:
    plan, *branches = outline_examples(SourceFile("tables.py", MODULE, ""), count_tokens=len)
    lines = plan.split("assistant\n", 1)[1].split("\n")
    assert lines[0] == "[PLAN]"
    points = [POINT.match(line) for line in lines[1:3]]
    assert [(p[1], p[3], p[4]) for p in points if p] == [
        ("1", "None", "read(path)"),
        ("2", "None", "write(path, rows)"),
    ]
    assert lines[3].startswith("[END]")
    assert len(branches) == 2
    assert "def write(path, rows):" in branches[1]
    assert branches[1].rstrip().endswith("[END]<|im_end|>")


def test_a_retrieval_example_asks_for_names_it_holds() -> None:
    example = retrieval_example(MODULE, ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"], random.Random(1))
    imports = dict(re.findall(r"^import (\w+) as (\w+)$", example, re.M))
    asked = re.findall(r"Which name was imported as (\w+)\?<\|im_end\|>\n<\|im_start\|>assistant\n(\w+)<", example)
    assert len(asked) == 3
    assert all(imports[name] == alias for alias, name in asked)
