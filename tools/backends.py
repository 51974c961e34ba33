"""`outrider backends` reports what each backend can, and whether this machine can run it and build for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from outrider.commands.arguments import Parser
from outrider.commands.console import guarded, print_json, stdout
from outrider.plans.backends import BACKENDS, BackendSupport
from outrider.tools.markdown import markdown_table

_HEADS = ("backend", "runs on", "weights", "KV caches", "features")


def main(arguments: Sequence[str] | None = None, called: str = "python -m outrider.tools.backends") -> int:
    return guarded(lambda: _main(arguments, called))


def _main(arguments: Sequence[str] | None, called: str) -> int:
    parser = Parser(
        prog=called,
        description="Print the backends: what each runs on, its types of weights and of KV caches, which features it "
        "lacks and why, and whether this machine can run it and build for it.",
        epilog=f"examples: {called}; {called} --json",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the table of SUPPORT.md, which is of no machine")
    options = parser.parse_args(arguments)
    if options.markdown:
        print("\n".join(support_table()))
        return 0
    found = [(support, *reasons_here(support.kind)) for support in BACKENDS.values()]
    if options.json:
        rows = [asdict(support) | {"cannot_run": run, "cannot_build": build} for support, run, build in found]
        print_json({"backends": rows})
        return 0
    table = Table(*_HEADS[:-1], "lacks", "runs here", "builds here", box=None, pad_edge=False)
    for support, *reasons in found:
        table.add_row(
            *_cells(support)[:-1], ", ".join(support.lacks), *("no" if reason else "yes" for reason in reasons)
        )
    stdout.print(table, soft_wrap=False)
    for support, run, build in found:
        reasons = [f"lacks {feature}: it {reason}" for feature, reason in support.lacks.items()]
        reasons += [f"does not {verb} here: {why}" for verb, why in (("run", run), ("build", build)) if why is not None]
        for reason in reasons:
            stdout.print(f"{support.kind} {reason}", markup=False)
    return 0


def reasons_here(kind: str) -> tuple[str | None, str | None]:
    """Return why this machine cannot run the backend, and why it cannot build for it; None where it can."""
    from outrider.compiler.backends import BACKEND_CLASSES
    from outrider.runtime.backends import reason_against

    return reason_against(kind, None), BACKEND_CLASSES[kind](kind=kind).reason_against()


def support_table() -> list[str]:
    """Return the lines of the table of support, in Markdown."""
    return markdown_table(_HEADS, [_cells(support, "`") for support in BACKENDS.values()])


def _cells(support: BackendSupport, quote: str = "") -> tuple[str, ...]:
    """Return the cells of `_HEADS`."""
    kept = ", ".join(("as the weights", *support.kv_types))
    lacks = "; ".join(f"no {feature}: it {reason}" for feature, reason in support.lacks.items())
    return f"{quote}{support.kind}{quote}", support.runs_on, ", ".join(support.weights), kept, lacks or "all"


if __name__ == "__main__":
    sys.exit(main())
