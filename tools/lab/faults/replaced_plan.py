"""A plan that is replaced, moved, removed or written over while it is served, by one with other weights.

Replaced by a rename, as the compiler does it, moved or removed: the server continues with the plan that it has loaded,
and a new one serves what is in the folder then, or says that nothing is. Written over in place: answers stop, with an
error that says so, and none has other tokens.
"""

from __future__ import annotations

import json
import random
import shutil
from hashlib import sha256
from pathlib import Path
from time import sleep

from outrider.compiler.build import build
from outrider.compiler.place import Place
from outrider.compiler.recipe import source_recipe
from outrider.plans.errors import OutriderError
from outrider.plans.plan import MANIFEST, file_sha256, manifest_json, read_manifest
from outrider.tools.lab.faults.client import Client
from outrider.tools.lab.faults.crowd import Crowd, Ways, ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.questions import Question, make_questions
from outrider.tools.lab.faults.server import MODEL, Server
from outrider.tools.lab.faults.setting import Setting

_WRITTEN = "was written to while the plan is in use"
_SHORT = 8  # questions to a new server


def run(setting: Setting, figures: Figures) -> None:
    """One server lives through every replacement; newer ones serve what is in the folder by then."""
    other = write_successor(setting.plan, setting.file("other"), setting.seed)
    others = make_questions(other, _SHORT, setting.seed, setting.new, setting.prompts, setting.threads)
    plan, kept = copy_plan(setting.plan, setting.file("plan")), setting.file("kept")
    with setting.serve("--cache-file", str(kept), plan=plan) as server:
        with Crowd(server.port, setting.questions, figures, 2, setting.seed, Ways(pause=0.1)) as crowd:
            for name, replace, expected in (
                ("put in its place", lambda: Place(plan).put(copy_plan(other, setting.file("new"))), others),
                ("built over", lambda: _build_over(setting, plan), setting.questions[:_SHORT]),
                ("moved away", lambda: plan.rename(setting.file("moved")), None),
            ):
                setting.show(name)
                sleep(setting.seconds / 10)
                replace()
                figures.count("faults")
                _serve_anew(setting, figures, plan, name, expected)
            before = len(crowd.waits)
            sleep(setting.seconds / 10)
        figures.check(len(crowd.waits) > before, "Nothing was asked of the old plan in the end.")
        ask_all(server.port, setting.questions, figures)
        figures.check(_identity(server) == _name(setting.plan), "The old server serves another plan.")
        server.end()
    setting.show("a prefix cache of the old plan")
    _take_old_cache(setting, figures, other, others, kept)
    setting.show("written over")
    _write_over(setting, figures, other)


def _build_over(setting: Setting, plan: Path) -> None:
    """By the compiler, with another name in the recipe."""
    recipe = source_recipe(setting.plan, option="a plan whose recipe is there", overrides=["name=successor"])
    build(recipe, (setting.plan.resolve() / read_manifest(setting.plan).source).resolve(), plan)


def _serve_anew(setting: Setting, figures: Figures, plan: Path, name: str, expected: list[Question] | None) -> None:
    """Ask a new server of what the folder holds; without `expected`, that is nothing."""
    try:
        with setting.serve(plan=plan) as server:
            ask_all(server.port, expected or [], figures)
            figures.check(_identity(server) == _name(plan), f"{name}: a new server serves another plan.")
            figures.check(expected, f"A plan that was {name} is served anew.")
    except OutriderError as error:
        figures.check(expected is None and "is not a plan" in str(error), f"A plan {name} is refused: {error}")


def _name(plan: Path) -> str:
    return read_manifest(plan).identity[:12]


def _identity(server: Server) -> str | None:
    """What a server says that its plan is."""
    body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
    return Client(server.port).ask(body).fingerprint


def _write_over(setting: Setting, figures: Figures, other: Path) -> None:
    """Under load; what is refused is refused for that reason, and nothing has other tokens before."""
    plan = copy_plan(setting.plan, setting.file("plan"))
    ways = Ways(excuses=lambda answer: _WRITTEN in (answer.error or {}).get("message", ""))
    with setting.serve(plan=plan) as server:
        with Crowd(server.port, setting.questions, figures, 8, setting.seed, ways):
            sleep(setting.seconds / 10)
            write_over(plan, other)
            figures.count("faults")
            sleep(setting.seconds / 10)
        answer = Client(server.port).ask(setting.questions[0].body)
        figures.check(answer.status == 500 and ways.excuses(answer), f"A plan written over is served: {answer}.")
        figures.check(server.end() == 0, "A server of a plan that was written over does not end with status 0.")
    figures.check(figures.refused, "No request was refused of a plan that was written over.")


def _take_old_cache(setting: Setting, figures: Figures, other: Path, others: list[Question], kept: Path) -> None:
    """A prefix cache that the old plan has saved is reported, and not used."""
    figures.check(kept.exists(), "No prefix cache was saved.")
    with setting.serve("--cache-file", str(kept), plan=other) as server:
        ask_all(server.port, others, figures)
        figures.check("another plan" in server.said, f"Nothing is said of an old prefix cache: {server.said}")
        figures.check("tokens of earlier" not in server.said, "A prefix cache of another plan is used.")


_BLOCK = 16  # bytes: the size of a tensor's largest number, so that swapped blocks hold numbers of its kind


def copy_plan(plan: Path, out: Path) -> Path:
    """A copy, so that the plan itself stays as it is."""
    return Path(shutil.copytree(plan, out))


def write_successor(plan: Path, out: Path, seed: int) -> Path:
    """A plan whose weights are those of `plan` in disorder: half of the pairs of neighbouring blocks are swapped."""
    copy_plan(plan, out)
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    draw = random.Random(seed)
    for file in manifest["files"]:
        path = out / file["path"]
        if path.suffix == ".bin":
            path.write_bytes(_disordered(path.read_bytes(), draw))
            file["sha256"] = file_sha256(path)
    manifest["identity"] = sha256(f"{manifest['identity']} {seed}".encode()).hexdigest()
    (out / MANIFEST).write_text(manifest_json(manifest), encoding="utf-8")
    return out


def _disordered(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for place in range(0, len(data) - 2 * _BLOCK, 2 * _BLOCK):
        if draw.random() < 0.5:
            one, two = slice(place, place + _BLOCK), slice(place + _BLOCK, place + 2 * _BLOCK)
            changed[one], changed[two] = data[two], data[one]
    return bytes(changed)


def write_over(plan: Path, other: Path) -> None:
    """What `dd conv=notrunc` or a careless program does: every file of `other` into the file of that name, in place,
    without making it shorter first."""
    for path in sorted(other.rglob("*")):
        if path.is_file():
            with (plan / path.relative_to(other)).open("r+b") as file:
                file.write(path.read_bytes())
