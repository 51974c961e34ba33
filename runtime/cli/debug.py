"""`generate --debug`: each round on the terminal."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.text import Text

from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.trace import Node, RoundTrace


def log_to(console: Console) -> None:
    """Print what drafters and adaptive speculation decide, the log `outrider`, on `console`."""
    logger = logging.getLogger("outrider")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_ConsoleHandler(console))


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), style="dim", highlight=False, soft_wrap=True)


class RoundPrinter:
    """Prints rounds as they come: position, drafted tree with the drafter's probabilities, and what was committed.

    By rejection, r and p / q follow the probability of every token that the target came to.

    Accepted tokens have a `+`, those that the target did not choose a `-`, the correction (or the bonus after a draft
    that was accepted whole) a `=`; colours where the console has them say the same.
    """

    def __init__(self, tokenizer: Tokenizer, console: Console) -> None:
        self._tokenizer, self._console = tokenizer, console

    def __call__(self, round_: RoundTrace) -> None:
        line = Text(f"{round_.position:6d} ", style="dim")
        for node in round_.nodes:
            line.append_text(self._node(node))
            line.append(" ")
        if len(round_.committed) > sum(node.accepted for node in round_.nodes):
            line.append("= " + self._shown(round_.committed[-1]), style="bold cyan")
        if round_.left_out:
            line.append(f" {round_.left_out} not worth verifying", style="dim")
        self._console.print(line, soft_wrap=True, highlight=False)

    def _node(self, node: Node) -> Text:
        mark, style = ("+", "green") if node.accepted else ("-", "red")
        text = Text(f"{mark}{self._shown(node.token_id)}", style=style)
        details = [] if node.probability is None else [f"{node.probability:.2f}"]
        if node.draw is not None:
            details.append(f"r {node.draw:.2f} p/q {node.ratio:.2f}")
        if node.parent != node.depth - 1 or not node.accepted:
            details.append(f"d{node.depth}<{node.parent}")
        text.append(f"({' '.join(details)})" if details else "", style="dim")
        return text

    def _shown(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return repr(raw.decode("utf-8"))
        except UnicodeDecodeError:  # a part of a character
            return repr(raw)
