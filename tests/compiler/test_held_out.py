"""Held-out prompts are read by line, and what is wrong with one is said with its place."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from outrider.compiler.held_out import Prompt, read_prompts, read_tasks, read_text
from outrider.plans.errors import RecipeError


def test_texts_and_tasks(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "task": "long"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert read_tasks(path) == [Prompt("a", "long"), Prompt("b")]
    assert read_prompts(path) == ["a", "b"]
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="holds no prompts"):
        read_tasks(path)
    with pytest.raises(RecipeError, match="cannot be read as UTF-8 text"):
        read_tasks(tmp_path / "away.jsonl")


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    no_text = 'must be a JSON object with a text under "prompt"'
    task = '"task" must be a name; correct it, or leave it out'
    for line in ("[]", '{"prompt": ""}', "[" * 100_000, '{"prompt": "a", "task": 3}'):
        path.write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf-8")
        with pytest.raises(RecipeError, match=rf"prompts\.jsonl:2: .*{task if 'task' in line else no_text}"):
            read_tasks(path)


def test_a_gzipped_file_reads_as_the_plain_one_and_a_broken_one_is_named(tmp_path: Path) -> None:
    plain, packed = tmp_path / "prompts.jsonl", tmp_path / "prompts.jsonl.gz"
    plain.write_text('{"prompt": "ä", "task": "long"}\r\n{"prompt": "b"}\n', encoding="utf-8", newline="")
    whole = gzip.compress(plain.read_bytes())
    packed.write_bytes(whole)
    assert read_text(packed) == read_text(plain)
    assert read_tasks(packed) == read_tasks(plain)
    bad_block = whole[:10] + b"\xff" + whole[11:]
    for broken in (plain.read_bytes(), whole[:-9], whole[:-8] + bytes(8), bad_block, gzip.compress(b"\xff\n")):
        packed.write_bytes(broken)
        with pytest.raises(RecipeError, match=r"prompts\.jsonl\.gz cannot be read as UTF-8 text"):
            read_tasks(packed)
    packed.write_bytes(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.compiler.held_out._LARGEST", 10)
        with pytest.raises(RecipeError, match="unpacks to more than 10 characters"):
            read_tasks(packed)
    plain.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())  # as editors of Windows write it
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_tasks(plain) == read_tasks(packed)
    assert read_tasks(plain)[0].text == "ä"
