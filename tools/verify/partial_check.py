"""What partial KV does to tokens, on held-out text: nothing in lossless mode, and how much in lossy mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, cycle

from outrider import Session, Stats
from outrider.plans.manifest import Manifest
from outrider.plans.partial_kv import PartialMode
from outrider.runtime.options.options import Options
from outrider.tools.parting import same_share

_TIMES = 2  # contexts are so much longer than the first at which the partial KV cache serves


@dataclass
class PartialCheck:
    """Runs after prompts of `context` tokens, made of the held-out ones, with the plan's first drafter.

    `agreement` is the share of tokens that a pass over the partial cache chose as one over the full cache did, where
    all before were the same. `same` is the share of lossy mode's tokens before the first that differs from full KV's, a
    mean over runs. None where the partial KV cache never served.
    """

    context: int
    runs: int = 0
    tokens: int = 0
    lossless_equal_runs: int = 0
    lossy_equal_runs: int = 0
    agreement: float | None = None
    same: float | None = None
    partial_rounds: int = 0

    @property
    def passed(self) -> bool:
        return self.lossless_equal_runs == self.runs

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


def check_partial(
    session: Session,
    manifest: Manifest,
    prompts: Sequence[list[int]],
    new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> PartialCheck | None:
    """Run every prompt in all three modes: none where no context is left to use it in. None without a partial KV cache.

    `advance` is called after each prompt.
    """
    partial = manifest.partial_kv
    if partial is None:
        return None
    served = max(partial.partial_threshold, partial.front(partial.n_retrieval_blocks))
    length = min(_TIMES * served, manifest.target.context - new_tokens)
    check, parted, agreed = PartialCheck(length), 0, 0
    if length <= served:
        return check
    shares: list[float] = []
    for index in range(len(prompts)):
        tokens = _joined(prompts, index, length)

        def run(mode: PartialMode, tokens: list[int] = tokens) -> tuple[list[int], Stats]:
            options = Options(max_new_tokens=new_tokens, ignore_eos=True, auto_disable=False, partial_kv=mode)
            made = session.generate(tokens, whole=True, **options)
            return made.token_ids, made.stats

        expected, _ = run("off")
        lossless, stats = run("lossless")
        lossy, rough = run("lossy")
        check.runs += 1
        check.tokens += len(expected)
        check.lossless_equal_runs += lossless == expected
        check.lossy_equal_runs += lossy == expected
        check.partial_rounds += stats.partial_rounds + rough.partial_rounds
        parted += stats.parted
        agreed += stats.agreed
        shares.append(same_share(expected, lossy))
        advance()
    if check.partial_rounds:
        check.same = sum(shares) / len(shares)
        check.agreement = agreed / (agreed + parted) if agreed + parted else None
    return check


def _joined(prompts: Sequence[list[int]], first: int, length: int) -> list[int]:
    """The last `length` tokens of as many prompts as it takes, from one of them on."""
    parts: list[list[int]] = []
    for tokens in cycle([*prompts[first:], *prompts[:first]]):
        parts.append(tokens)
        if sum(map(len, parts)) >= length:
            break
    return list(chain.from_iterable(parts))[-length:]
