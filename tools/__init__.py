"""Tools: each is a command, `python -m outrider.tools.NAME`."""

import sys

from outrider.commands.process import begin

if sys.argv[0] == "-m":  # as of now, a tool is looked up to be run: before its imports, which take a second
    begin()
