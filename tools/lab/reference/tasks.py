"""Tasks made from source files: outlines (`[PLAN]` lines, then one function per branch) and retrieval.

The outline format of `runtime/skeleton/outline.py`: `[DIRECT] ... [END]`, or `[PLAN]`, lines `1.<len><tool>[-]Title`
and `[END]`. `len` is the point's length in tokens, rounded up to tens. A branch continues from the whole plan: the
point's line again, then its function, then `[END]`.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable

from outrider.tools.lab.reference.corpus import SourceFile

USER, ASSISTANT, CLOSE = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMPORT, QUESTION = "import {name} as {alias}", "Which name was imported as {alias}?"
_MOST_POINTS, _LONGEST_FUNCTION, _LONGEST_DOCSTRING, _LONGEST_TITLE = 12, 2400, 900, 90


def turn(question: str, answer: str) -> str:
    return f"{USER}{question}{CLOSE}{ASSISTANT}{answer}{CLOSE}"


def outline_examples(file: SourceFile, count_tokens: Callable[[str], int]) -> list[str]:
    """The plan of a module, one example per point, or a `[DIRECT]` answer for a module without functions."""
    try:
        module = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return []
    docstring = (ast.get_docstring(module) or "")[:_LONGEST_DOCSTRING].strip()
    if len(docstring) < 20:
        return []
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sources = {node.name: ast.get_source_segment(file.text, node) or "" for node in functions}
    functions = [node for node in functions if 20 < len(sources[node.name]) <= _LONGEST_FUNCTION][:_MOST_POINTS]
    if len(functions) < 2:
        body = file.text[:_LONGEST_FUNCTION].rsplit("\n", 1)[0]
        return [turn(docstring, f"[DIRECT]\n{body}\n[END]")]
    points = []
    for number, node in enumerate(functions, 1):
        length = -(-count_tokens(sources[node.name]) // 10) * 10
        title = f"{node.name}({ast.unparse(node.args)})"[:_LONGEST_TITLE].replace("\n", " ")
        points.append(f"{number}.<{length}><None>[-]{title}")
    plan = "[PLAN]\n" + "\n".join(points) + "\n[END]"
    examples = [turn(docstring, plan)]
    for point, node in zip(points, functions, strict=True):
        examples.append(turn(docstring, f"{plan}\n{point}\n{sources[node.name]}\n[END]"))
    return examples


def retrieval_example(text: str, names: list[str], rng: random.Random, questions: int = 3) -> str:
    """`text` with renamed imports strewn in at line borders, and a question for each."""
    lines = text.split("\n")
    chosen = rng.sample(names, 2 * questions)
    pairs = list(zip(chosen[:questions], chosen[questions:], strict=True))
    for name, alias in pairs:
        lines.insert(rng.randrange(len(lines) + 1), IMPORT.format(name=name, alias=alias))
    rng.shuffle(pairs)
    first = turn("\n".join(lines) + "\n" + QUESTION.format(alias=pairs[0][1]), pairs[0][0])
    return first + "".join(turn(QUESTION.format(alias=alias), name) for name, alias in pairs[1:])


def identifiers(files: list[SourceFile], least: int = 5) -> list[str]:
    """Names to ask for: lower-case words seen in `least` of the files, common enough to be a few tokens long."""
    counts: dict[str, int] = {}
    for file in files:
        for word in set(re.findall(r"\b[a-z][a-z_]{3,14}\b", file.text)):
            counts[word] = counts.get(word, 0) + 1
    return sorted(word for word, count in counts.items() if count >= least)
