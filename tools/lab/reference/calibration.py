"""Text that quantised weights are searched on: stretches of training files, so that held-out text stays unseen."""

from __future__ import annotations

import json
import random
from pathlib import Path

from outrider.tools.lab.reference.corpus import SourceFile, write_text
from outrider.tools.lab.reference.prompts import Row

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
