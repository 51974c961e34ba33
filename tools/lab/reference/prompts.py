"""Held-out prompts by task: what `outrider verify`, `outrider tune` and the benchmark continue."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

from outrider.compiler.held_out import read_text
from outrider.tools.lab.reference.corpus import SourceFile, write_text

COMPLETION, DOCSTRING, LONG = TASKS = ("completion", "docstring", "long")
"""The opening of a stretch of code; a function's signature and docstring, for its body; a long file's beginning."""
PROMPTS, PROMPT_LINES, LINES_BEHIND = 60, (8, 40), 30
FUNCTIONS, FUNCTIONS_OF_A_FILE, HEAD_LINES, BODY_LINES = 20, 2, 30, 5
LONG_FILES, LONG_CHARACTERS = 12, 5400  # 1.2k to 1.7k tokens of the reference target

Row = dict[str, str | int]


def write_prompts(files: list[SourceFile], path: Path) -> None:
    """A line for each prompt, gzipped: its task, and the file and line it comes from."""
    rows = [*_completions(files), *_docstrings(files), *_long(files)]
    write_text("".join(json.dumps(row) + "\n" for row in rows), path)


def read_completions(path: Path) -> list[Row]:
    """Of such a file, or of one that names no tasks, the rows of the task that drafters are judged by."""
    rows: list[Row] = [json.loads(line) for line in read_text(path).splitlines()]
    return [row for row in rows if row.get("task", COMPLETION) == COMPLETION]


def _completions(files: list[SourceFile]) -> Iterator[Row]:
    rng = random.Random(0)
    for number in range(PROMPTS):
        file = files[number % len(files)]
        count = file.text.count("\n") + 1
        size = rng.randint(*PROMPT_LINES)
        if count < size + 8:
            size = max(3, count // 2)
        start = rng.randrange(max(1, count - size - LINES_BEHIND))
        yield _row(COMPLETION, file, start, start + size)


def _docstrings(files: list[SourceFile]) -> Iterator[Row]:
    rng = random.Random(1)
    found = []
    for file in files:
        heads = _heads(file)
        chosen = sorted(rng.sample(heads, min(len(heads), FUNCTIONS_OF_A_FILE)))
        found += [(place, _row(DOCSTRING, file, *head)) for place, head in enumerate(chosen)]
    found.sort(key=lambda pair: pair[0])  # one of every file first
    return (row for _, row in found[:FUNCTIONS])


def _heads(file: SourceFile) -> list[tuple[int, int]]:
    """Where functions' signatures with their docstrings begin and end, as indices of lines."""
    try:
        nodes = list(ast.walk(ast.parse(file.text)))
    except (SyntaxError, ValueError):
        return []
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(n)]
    spans = [(node.lineno - 1, node.body[0].end_lineno or 0, node.end_lineno or 0) for node in functions]
    return [(start, end) for start, end, last in spans if end - start <= HEAD_LINES and last - end >= BODY_LINES]


def _long(files: list[SourceFile]) -> Iterator[Row]:
    enough = [file for file in files if len(file.text) > LONG_CHARACTERS * 5 // 4]
    return (_row(LONG, file, 0, file.text.count("\n", 0, LONG_CHARACTERS)) for file in enough[:LONG_FILES])


def _row(task: str, file: SourceFile, start: int, end: int) -> Row:
    prompt = "\n".join(file.text.split("\n")[start:end]) + "\n"
    return {"task": task, "file": file.name, "line": start + 1, "prompt": prompt}


TEXTS, CHARACTERS = 24, 1700
"""12k tokens of the reference target; twice as many gain next to nothing."""


def write_calibration(files: list[SourceFile], path: Path) -> None:
    """Write, gzipped, a line for each text: the file and the line that it comes from, and the text as `prompt`."""
    rng = random.Random(0)
    enough = [file for file in files if not file.held_out and not file.is_test and len(file.text) > 4 * CHARACTERS]
    rows: list[Row] = []
    for file in rng.sample(enough, min(TEXTS, len(enough))):
        start = file.text.find("\n", rng.randrange(len(file.text) - 2 * CHARACTERS)) + 1
        end = file.text.find("\n", start + CHARACTERS) + 1
        rows.append({"file": file.name, "line": file.text.count("\n", 0, start) + 1, "prompt": file.text[start:end]})
    write_text("".join(json.dumps(row) + "\n" for row in rows), path)
