"""Sessions in several threads on one runtime's engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider import Runtime


def test_sessions_in_several_threads_say_what_each_says_alone(toy_plan: Path) -> None:
    """Prompts long enough for engines to share out their work, and drafts of every kind."""
    runtime = Runtime.load(toy_plan, threads=2)
    asked = [
        ([5 + i, 9, 7] * (12 + 6 * i), drafter, 0.0 if i % 2 else 1.0)
        for i, drafter in enumerate(("none", "ngram", "chain", "bushy", "head", "mixed"))
    ]

    def say(of: tuple[list[int], str, float]) -> list[list[int]]:
        prompt, drafter, temperature = of
        session, said = runtime.session(), []
        for seed in range(4):
            session.reset()
            found = session.generate(prompt, max_new_tokens=24, drafter=drafter, temperature=temperature, seed=seed)
            said.append(found.token_ids)
        return said

    alone = [say(each) for each in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(say, asked)) == alone
