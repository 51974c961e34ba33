"""Same seed, same tokens: runs of a plan with its drafters against plain decoding, and by how little they part.

On the CPU drafts are bit-exact, so that there is never a near tie; elsewhere they may be the last bits away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from outrider import Generation, Session
from outrider.runtime.options.options import Options
from outrider.tools.parting import Parting, find_parting


@dataclass
class DrafterCheck:
    """Results of a drafter on some prompts."""

    tokens: int = 0
    rounds: int = 0
    equal_runs: int = 0
    partings: list[Parting] = field(default_factory=list)

    @property
    def tokens_per_verify(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def passed(self) -> bool:
        return all(parting.near_tie for parting in self.partings)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"tokens_per_verify": self.tokens_per_verify}


def compare_drafters(
    session: Session,
    prompts: Sequence[list[int]],
    drafters: Sequence[str],
    options: Options,
    tolerance: float,
    *,
    exact: bool,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, DrafterCheck]:
    """Run every prompt (token ids) plainly and with each drafter, to the limit of `options`.

    A `Parting` is a near tie where its `margin` is within `tolerance` (logits), and none where the backend promises
    `exact` results. Drafters by rejection have nothing to agree with at a temperature.
    `advance` is called after each prompt.
    """
    checks = {name: DrafterCheck() for name in drafters}
    always = options | Options(ignore_eos=True, auto_disable=False)

    def run(ids: list[int], drafter: str) -> Generation:
        merged: Options = always | Options(drafter=drafter, partial_kv="off")
        return session.generate(ids, whole=True, **merged)

    for prompt, ids in enumerate(prompts):
        plain = run(ids, "none").token_ids
        for name, check in checks.items():
            drafted = run(ids, name)
            check.tokens += len(drafted.token_ids)
            check.rounds += drafted.stats.rounds
            parted = find_parting(session, prompt, ids, options, plain, drafted.token_ids)
            if parted is None:
                check.equal_runs += 1
            else:
                check.partings.append(replace(parted, near_tie=not exact and parted.margin <= tolerance))
        advance()
    return checks
