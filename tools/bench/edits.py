"""The task `edit`: a file, the wish for the same file with a name changed, and the changed file's first lines.

After them the file continues as it did, but for the name: nearly every token is in the prompt already, in its place.
That is how editors ask for code, and the best that drafts of what the prompt holds can meet. The prompts are
made of those of the task `long`, without chance: the same file gives the same prompts.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Sequence

from outrider.compiler.held_out import Prompt
from outrider.plans.errors import RequestError

EDIT, SOURCE = "edit", "long"
CHARACTERS = 2200  # of a file: about 600 tokens of the reference target
LEAST_LINES, MOST_SHARE = 5, 1 / 2  # of the changed file that a prompt begins with
_NAME, _WORD = r"[^\W\d]\w{2,}", r"\b[^\W\d]\w{4,}\b"
_DEFINED = re.compile(rf"\b(?:def|class)\s+({_NAME})|^[ \t]*({_NAME})[ \t]*=[^=]", re.MULTILINE)
_COMMON = {*keyword.kwlist, *dir(builtins), "self", "cls"}  # what no edit of one file renames


def make_edits(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A prompt of the task `edit` for each of `prompts`, in their order.

    Raises `RequestError` for one that has no two lines, or no name.
    """
    return [Prompt(_edit(prompt.text, place), EDIT) for place, prompt in enumerate(prompts)]


def _edit(text: str, place: int) -> str:
    file = text[: text.rfind("\n", 0, CHARACTERS) + 1]
    name = _name(file)
    if name is None or file.count("\n") < 2:
        raise RequestError(
            f"Prompt {place} of the task {SOURCE}, counted from 0, has no name to change in its first {CHARACTERS} "
            f"characters, or no two lines; {EDIT} needs code or prose of several lines. Pass other --prompts."
        )
    new = f"new_{name}"
    while new in file:
        new = f"new_{new}"
    lines = re.sub(rf"\b{name}\b", new, file).splitlines(keepends=True)
    shown = 1 + next(index for index, line in enumerate(lines) if new in line)
    most = max(1, int(MOST_SHARE * len(lines)))
    beginning = "".join(lines[: min(max(shown, LEAST_LINES), most)])
    return f"{file}\n\n# The same file, with {name} renamed to {new}:\n\n{beginning}"


def _name(file: str) -> str | None:
    """The function, class or variable of the file that stands in it most often, the first of several; of a text that
    defines none, the word, of five letters or more. None where there is neither."""
    defined = [name for pair in _DEFINED.findall(file) for name in pair if _renamable(name)]
    named = defined or [word for word in re.findall(_WORD, file) if _renamable(word)]
    counts = Counter(re.findall(rf"\b{_NAME}\b", file))
    return max(named, key=lambda name: counts[name], default=None)


def _renamable(name: str) -> bool:
    return bool(name) and name not in _COMMON and not name.startswith("__")
