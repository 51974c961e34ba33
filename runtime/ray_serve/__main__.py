"""`outrider serve-ray PLAN`: replicas of a plan at one address, until the command is ended."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import sys

from outrider.runtime.ray_serve.command import main

if __name__ == "__main__":
    sys.exit(main())
