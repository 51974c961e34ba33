"""What the console command `outrider` runs first: it finds our packages, whatever the user's folders are called.

Installed at the top, beside our packages. A folder `runtime/` or a file `plans.py` of the user's, on a PYTHONPATH with
an entry such as `.`, would be found before ours; so would `tools`, which is why this is no module of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OURS = frozenset({"commands", "compiler", "plans", "plugins", "runtime", "tools"})
_HOME = str(Path(__file__).resolve().parent)


class BesideThis:
    """A finder of our packages where this module is installed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_HOME]) if name in OURS else None


def main() -> int:
    # Before sys.path is searched, and behind what an editable installation has put there, which finds ours as well.
    sys.meta_path.insert(sys.meta_path.index(PathFinder), BesideThis)
    from commands.process import begin

    begin()
    from tools.command import main as run

    return run()
