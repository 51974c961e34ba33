"""The command `outrider`, which is `python -m outrider` as well."""

from __future__ import annotations

import sys

from outrider.commands.process import begin


def main() -> int:
    begin()
    from outrider.tools.command import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
