"""The commands of `outrider`: what each is, and which module runs it. Only that module is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

from outrider.commands.console import guarded
from outrider.commands.packages import optional_packages
from outrider.plans.errors import UsageError

CALLED = "outrider"


@dataclass(frozen=True)
class Command:
    """`module` has `main(arguments, called)`, where `called` is what the user typed before the arguments.

    With `of_several`, the command's own name is the first of the arguments.
    """

    module: str
    help: str
    of_several: bool = False


COMPILER, RUNTIME = "outrider.compiler.__main__", "outrider.runtime.__main__"

GROUPS: dict[str, dict[str, Command]] = {
    "compile": {
        "build": Command(COMPILER, "recipe to plan", of_several=True),
        "inspect": Command(COMPILER, "what a plan holds", of_several=True),
        "verify": Command("outrider.tools.verify.__main__", "compare a plan with its checkpoint in transformers"),
        "tune": Command("outrider.tools.tune.__main__", "choose a draft tree for this machine"),
        "recipe": Command(COMPILER, "the keys of a recipe", of_several=True),
        "families": Command(COMPILER, "the models that can be compiled", of_several=True),
        "backends": Command("outrider.tools.backends", "what runs plans: what each can, and which run and build here"),
    },
    "run": {
        "generate": Command(RUNTIME, "continue a prompt", of_several=True),
        "branches": Command(RUNTIME, "continue a prompt in several ways at once", of_several=True),
        "skeleton": Command(RUNTIME, "outline an answer, then write its points at once", of_several=True),
        "chat": Command(RUNTIME, "talk with the model", of_several=True),
        "serve": Command(RUNTIME, "serve the plan over HTTP", of_several=True),
        "serve-ray": Command("outrider.runtime.ray_serve.command", "serve the plan by replicas on a Ray cluster"),
        "batch": Command(RUNTIME, "answer a file of requests", of_several=True),
        "embed": Command(RUNTIME, "build the C library", of_several=True),
        "options": Command(RUNTIME, "the options of a generation", of_several=True),
    },
    "measure": {
        "doctor": Command("outrider.tools.doctor", "what is installed here, and which backends can run"),
        "bench": Command("outrider.tools.bench.__main__", "drafters, draft trees and start-up, by the clock"),
        "exactness": Command(
            "outrider.tools.exactness.__main__", "the same tokens under every condition around a request"
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments`, or the process's own, name; the exit status."""
    return guarded(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        print(_help())
        return 0
    if name == "--version":
        print(f"{CALLED} {version(CALLED)}")
        return 0
    if name not in COMMANDS:
        raise UsageError(_unknown(name))
    command = COMMANDS[name]
    with optional_packages(f"{CALLED} {name}", "compiler"):
        module = import_module(command.module)
    if command.of_several:
        return int(module.main(arguments, CALLED))
    return int(module.main(arguments[1:], f"{CALLED} {name}"))


def _help() -> str:
    lines = [f"usage: {CALLED} COMMAND ...", "", "Compiles large language models into plans, and decodes plans."]
    width = max(map(len, COMMANDS))
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:{width}}  {command.help}" for name, command in commands.items())]
    return "\n".join(
        [*lines, "", f"{CALLED} COMMAND --help says what each takes, and {CALLED} --version which this is."]
    )


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"{name} stands before a command; see {CALLED} --help"
    close = get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean {close[0]}? See" if close else f"it has {', '.join(COMMANDS)}; see"
    return f"{CALLED} has no command {name!r}; {meant} {CALLED} --help"
