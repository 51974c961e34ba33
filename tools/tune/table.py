"""The table after the choice of a draft tree: its figures, as text, as JSON, and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from outrider.plans.manifest import Tree
from outrider.tools.measuring import Column, make_table

_SHOWN = 12  # estimates, as text
_LABELLED = 6  # estimates, in the picture, with their number of nodes


@dataclass(frozen=True)
class Shape:
    """A draft tree's shape, as the recipe has it."""

    top_k: int
    depth: int
    nodes: int

    @property
    def tree(self) -> Tree:
        return Tree(top_k=self.top_k, depth=self.depth, nodes=self.nodes)


@dataclass(frozen=True)
class Estimate(Shape):
    """Prediction for a tree: `round_ms` is to verify, to draft and the host's time together."""

    tokens_per_verify: float
    round_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class Timed(Shape):
    """Measurement of a tree against plain decoding, prompts included: medians, and the speedup that of pairs.

    `current`: it is the plan's own tree.
    """

    current: bool
    speedup: float
    tokens_per_verify: float
    tokens_per_second: float
    same_tokens: bool


@dataclass
class Tuning:
    """Measurements of `tools.tune.search`, in milliseconds, and predictions from them.

    `context`: tokens after which verifying was timed. `plain_ms`: a plain pass of the target; `verify_ms[i]`: one with
    i + 1 nodes; `draft_ms[top_k][depth]`: the drafter's engine; `host_ms`: what the host adds to a round;
    `plain_round_ms`: a round of plain decoding, host and all. Acceptance is that of the recorded trees of the largest
    top_k. `estimates`: each top_k and depth with its best number of nodes, the fastest first; `timed`: those that were
    built and raced, the fastest first.
    """

    plan: str
    identity: str
    drafter: str
    prompts: int
    new_tokens: int
    temperature: float = 0.0
    context: int = 0
    plain_ms: float = 0.0
    plain_round_ms: float = 0.0
    host_ms: float = 0.0
    verify_ms: list[float] = field(default_factory=list)
    draft_ms: dict[int, list[float]] = field(default_factory=dict)
    acceptance_by_depth: list[float] = field(default_factory=list)
    acceptance_by_rank: list[float] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)

    @property
    def chosen(self) -> Timed:
        return self.timed[0]

    @property
    def plain_tokens_per_second(self) -> float:
        """Without prompts, as the estimates."""
        return 1000 / self.plain_round_ms

    def to_json(self) -> dict[str, object]:
        """All of it, with stable keys; `pays`: the chosen tree was faster than plain decoding."""
        chosen = self.chosen
        return asdict(self) | {
            "verify_ms": [{"nodes": nodes, "ms": ms} for nodes, ms in enumerate(self.verify_ms, start=1)],
            "draft_ms": [
                {"top_k": k, "depth": depth, "ms": ms}
                for k, row in self.draft_ms.items()
                for depth, ms in enumerate(row)
            ],
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "chosen": chosen.tree.model_dump(),
            "pays": chosen.speedup > 1,
        }


def print_tuning(found: Tuning, console: Console) -> None:
    console.print(
        f"drafter {found.drafter} of plan {found.identity[:12]}, {found.prompts} prompts, "
        f"{found.new_tokens} new tokens, temperature {found.temperature:g}"
    )
    console.print(f"\nmilliseconds of a pass of the target after {found.context} tokens, by nodes (0: plain decoding)")
    _print_rows(console, "nodes", range(len(found.verify_ms) + 1), {"": [found.plain_ms, *found.verify_ms]})
    console.print(f"\nmilliseconds of a draft, by depth; the host adds {found.host_ms:.3f} to a round")
    depths = range(max(map(len, found.draft_ms.values())))
    _print_rows(console, "depth", depths, {f"top_k {k}": row for k, row in found.draft_ms.items()})
    console.print(f"\nrecorded trees of top_k {max(found.draft_ms)}")
    by_depth = ", ".join(f"{share:.0%}" for share in found.acceptance_by_depth)
    by_rank = ", ".join(f"{share:.0%}" for share in found.acceptance_by_rank)
    console.print(f"  rounds that accepted at least 1, 2, 3 ... tokens: {by_depth or 'none'}")
    console.print(f"  accepted tokens that were their parent's best, second ... child: {by_rank or 'none'}")

    console.print(f"\nestimated (plain decoding {found.plain_tokens_per_second:.0f} tokens/s)")
    console.print(make_table(_ESTIMATED, map(asdict, found.estimates[:_SHOWN])))
    console.print("\nbuilt and timed against plain decoding, alternately, prompts included")
    rows = []
    for timed in found.timed:
        notes = ["chosen"] * (timed is found.chosen) + ["the plan's own"] * timed.current
        rows.append(asdict(timed) | {"note": ", ".join(notes)})
    console.print(make_table(_TIMED, rows))
    if found.chosen.speedup <= 1:
        console.print(f"No tree of {found.drafter} pays here: plain decoding is faster.")


def _print_rows(console: Console, title: str, columns: range, rows: dict[str, list[float]]) -> None:
    lines = [
        {title: name}
        | {str(place): f"{ms:.{2 if ms < 10 else 1 if ms < 100 else 0}f}" for place, ms in enumerate(values)}
        for name, values in rows.items()
    ]
    figures = [Column(str(place), str(place)) for place in columns]
    console.print(make_table([Column(title, title, text=True), *figures], lines))


_SIZES = (Column("top_k", "top_k"), Column("depth", "depth"), Column("nodes", "nodes"))
_PER_VERIFY, _RATE = Column("tokens/verify", "tokens_per_verify", ".2f"), Column("tokens/s", "tokens_per_second", ".0f")
_ESTIMATED = (*_SIZES, _PER_VERIFY, Column("round ms", "round_ms", ".2f"), _RATE)
_TIMED = (
    *_SIZES, _PER_VERIFY, _RATE, Column("speedup", "speedup", ".2f", "x"),
    Column("same tokens", lambda row: "yes" if row["same_tokens"] else "NO"), Column("", "note"),
)  # fmt: skip


def draw_tuning(found: Tuning, path: Path) -> bool:
    """Draw the table to a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(12, 8), layout="constrained")
    verify, draft, gain, speed = figure.subplots(2, 2).flat
    figure.suptitle(f"{found.drafter}: trees on this machine, plan {found.identity[:12]}")
    verify.plot(range(1, len(found.verify_ms) + 1), found.verify_ms, marker="o")
    verify.axhline(found.plain_ms, linestyle=":", color="grey", label="plain decoding")
    verify.set(title="target: a pass", xlabel="nodes verified", ylabel="ms")
    for top_k, row in found.draft_ms.items():
        draft.plot(range(len(row)), row, marker="o", label=f"top_k {top_k}")
        best = sorted((e for e in found.estimates if e.top_k == top_k), key=lambda e: e.depth)
        depths = [e.depth for e in best]
        (line,) = gain.plot(depths, [e.tokens_per_verify for e in best], marker="o", label=f"top_k {top_k}")
        speed.plot(depths, [e.tokens_per_second for e in best], marker="o", color=line.get_color())
        for e in best:
            if e in found.estimates[:_LABELLED]:
                speed.annotate(
                    str(e.nodes), (e.depth, e.tokens_per_second), xytext=(4, 4), textcoords="offset points",
                    color=line.get_color(),
                )  # fmt: skip
    draft.set(title="drafter: a draft", xlabel="depth", ylabel="ms")
    gain.set(title="tokens per verify, at the best number of nodes", xlabel="depth")
    speed.axhline(found.plain_tokens_per_second, linestyle=":", color="grey", label="plain decoding")
    speed.scatter([t.depth for t in found.timed], [t.tokens_per_second for t in found.timed], marker="x", color="black")
    speed.scatter([], [], marker="x", color="black", label="timed, prompts included")
    speed.set(title="tokens per second, estimated (the best with their number of nodes)", xlabel="depth")
    for axes in (verify, draft, gain, speed):
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, dpi=120)
    return True
