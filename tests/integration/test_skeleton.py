"""Skeleton-of-thought: outline, branches and what is kept between them, against the same done by hand."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider import Runtime
from outrider.plans.errors import RequestError
from outrider.plans.skeleton import Skeleton as Settings
from outrider.runtime.__main__ import main
from outrider.runtime.cli import skeleton as skeleton_command
from outrider.runtime.skeleton import skeleton as skeleton_module
from outrider.runtime.skeleton.outline import END, outline_grammar, parse_outline
from outrider.runtime.skeleton.skeleton import Skeleton, SkeletonSpan, titles

QUESTION = "a module that reads files"
BRANCH = "{point}: {outline}"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
@pytest.mark.parametrize("drafter", ["none", "head"])
def test_it_is_what_one_would_do_by_hand(branching: Runtime, drafter: str, mode: str, direct: bool) -> None:
    options = {"max_new_tokens": 10, "drafter": drafter, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    skeleton = Skeleton(branching, Settings(most_points=3, direct=direct, outline_tokens=40, branch=BRANCH))
    said: dict[int | None, str] = {}
    stream = skeleton.stream(QUESTION, mode=mode, **options)
    while True:
        try:
            each = next(stream)
        except StopIteration as end:
            answer = end.value
            break
        said[each.point] = said.get(each.point, "") + each.text
    tokenizer = branching.tokenizer
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    form = {"grammar": outline_grammar((), 3, direct=direct)}
    session = branching.session()
    own = options | {"max_new_tokens": 40, "stop": [END], "ignore_eos": False}
    planned = session.generate(prompt, structured_outputs=form, **own)
    assert answer.planned.token_ids == planned.token_ids
    assert said[None] == planned.text
    if planned.finish_reason == "stop":
        assert answer.outline == parse_outline(planned.text + END)
    assert direct or answer.points
    for place, point in enumerate(answer.outline.points):
        others = [
            (answer.outline.points[number - 1], answer.points[number - 1]) for number in dict.fromkeys(point.waits_for)
        ]
        seen = "".join(f"{other.line}\n{written.text.strip()}\n" for other, written in others)
        text = f"{seen}{point.line}: {answer.outline.text}"
        ids = [*prompt, *tokenizer.encode(text, add_special_tokens=False)]
        expected = branching.generate(ids, stop=[END], stream_id=place, **options)
        assert answer.points[place].token_ids == expected.token_ids
        assert said[place] == expected.text
    if answer.points:
        assert answer.stats.reused_tokens == len(prompt) - 1
        assert answer.stats.prefill_passes == 0


def outlined(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Have every outline be this one."""
    monkeypatch.setattr(skeleton_module, "_outline_of", lambda _: parse_outline(text))


OUTLINE = f"[PLAN]\n1.<9><None>[-]a\n2.<90><None>[1]b\n3.<9><find>[2,1]c\n4.<9><other>[-]d\n{END}"


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
def test_points_see_what_they_wait_for_and_what_tools_find(
    branching: Runtime, monkeypatch: pytest.MonkeyPatch, mode: str, parallel: int
) -> None:
    outlined(monkeypatch, OUTLINE)
    titles_seen: list[str] = []

    def find(title: str) -> str:
        titles_seen.append(title)
        return "found it\n"

    options = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    skeleton = Skeleton(branching, Settings(branch="{point}>", outline_tokens=9), tools={"find": find})
    answer = skeleton.answer("x", mode=mode, max_parallel=parallel, **options)
    prompt = branching.tokenizer.encode(
        branching.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]), add_special_tokens=False
    )
    lines = OUTLINE.splitlines()[1:]
    texts = [generation.text.strip() for generation in answer.points]
    beginnings = [
        f"{lines[0]}>",
        f"{lines[0]}\n{texts[0]}\n{lines[1]}>",
        f"{lines[1]}\n{texts[1]}\n{lines[0]}\n{texts[0]}\n<find>\nfound it\n{lines[2]}>",
        f"<other> is not available.\n{lines[3]}>",
    ]
    for place, beginning in enumerate(beginnings):
        ids = [*prompt, *branching.tokenizer.encode(beginning, add_special_tokens=False)]
        expected = branching.generate(ids, stop=[END], stream_id=place, drafter="none", **options)
        assert answer.points[place].token_ids == expected.token_ids
    assert titles_seen == ["c"]
    assert answer.found == [None, None, "found it\n", None]


def test_points_are_written_while_a_tool_runs(branching: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    outlined(monkeypatch, f"[PLAN]\n1.<90><slow>[-]a\n2.<9><None>[-]b\n{END}")
    others_done = threading.Event()

    def slow(title: str) -> str:
        assert others_done.wait(60)
        return title

    said: list[int | None] = []
    stream = Skeleton(branching, tools={"slow": slow}).stream("x", max_new_tokens=6, ignore_eos=True)
    for each in stream:
        said.append(each.point)
        if each.point == 1 and each.ended:
            others_done.set()
    assert said.index(0) > len(said) - 1 - said[::-1].index(1)


def test_what_a_tool_does_wrong_ends_the_answer(branching: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    outlined(monkeypatch, f"[PLAN]\n1.<9><find>[-]a\n{END}")

    with pytest.raises(RequestError, match=r"What the tool find returned must be text \(str\), not int"):
        Skeleton(branching, tools={"find": len}).answer("x", max_new_tokens=2)
    with pytest.raises(RequestError, match=r"Branch 0: .*the plan's context is 160"):
        Skeleton(branching, tools={"find": lambda _: "long " * 200}).answer("x", max_new_tokens=2)
    with pytest.raises(RequestError, match=r"The tool find ended its thread: SystemExit\(3\)"):
        Skeleton(branching, tools={"find": lambda _: sys.exit(3)}).answer("x", max_new_tokens=2)
    assert Skeleton(branching, tools={"find": str.upper}).answer("x", max_new_tokens=2).found == ["A"]


def test_an_error_of_a_tool_ends_the_answer_at_once(branching: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    outlined(monkeypatch, f"[PLAN]\n1.<9><None>[-]a\n2.<9><find>[1]b\n{END}")

    def fails(title: str) -> str:
        raise KeyError(title)

    said: deque[SkeletonSpan] = deque()
    with pytest.raises(KeyError, match="b") as raised:
        said.extend(Skeleton(branching, tools={"find": fails}).stream("x", max_new_tokens=60, ignore_eos=True))
    assert not any(each.point == 0 and each.ended for each in said)
    assert raised.value.__notes__ == ["raised by the tool find of point 2, 'b'"]


def test_an_answer_that_is_cancelled_waits_for_no_tool(branching: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    outlined(monkeypatch, f"[PLAN]\n1.<9><slow>[-]a\n2.<9><None>[1]b\n{END}")
    cancel, released = threading.Event(), threading.Event()

    def slow(title: str) -> str:
        cancel.set()
        released.wait(60)
        return title

    try:
        answer = Skeleton(branching, tools={"slow": slow}).answer("x", max_new_tokens=6, cancel=cancel)
        tools = [thread for thread in threading.enumerate() if thread.name == "outrider-tool-slow"]
        assert [thread.daemon for thread in tools] == [True]  # the process ends without it
        assert [str(generation.finish_reason) for generation in answer.points] == ["cancelled"] * 2
        assert answer.found == [None, None]
    finally:
        released.set()


@pytest.mark.parametrize("tools", [{"a<b": str}, {"None": str}, {"": str}, {"a": 5}])
def test_a_tool_that_cannot_be_named_is_refused(branching: Runtime, tools: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"tools( has the name '|\['a'\] is of type int; pass a function)"):
        Skeleton(branching, tools=tools)
    with pytest.raises(RequestError, match="stop holds 16 texts; a skeleton takes at most 15"):
        Skeleton(branching).answer(QUESTION, stop=["a"] * 16)


def test_an_outline_may_want_the_tools_that_there_are(branching: Runtime) -> None:
    settings = Settings(most_points=2, direct=False, outline_tokens=60, tools=("planned",), branch="{point}")
    skeleton = Skeleton(branching, settings, tools={"given": str})
    wanted = {
        point.tool
        for seed in range(80)
        for point in skeleton.answer(QUESTION, seed=seed, temperature=1.0, max_new_tokens=1).outline.points
    }
    assert wanted == {None, "planned", "given"}


def test_the_command_has_points_that_grow_below_the_outline(
    branching: Runtime, branch_plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_new_tokens": 10, "ignore_eos": True, "temperature": 1.0}
    settings = Settings(most_points=3, direct=False, outline_tokens=40, branch=BRANCH)
    monkeypatch.setattr(skeleton_command, "Skeleton", lambda runtime: Skeleton(branching, settings))
    answers = (Skeleton(branching, settings).answer(QUESTION, seed=seed, **options) for seed in range(20))
    seed, answer = next((seed, answer) for seed, answer in enumerate(answers) if answer.points)
    arguments = ["skeleton", str(branch_plan), "--question", QUESTION, "--max-new-tokens", "10", "--ignore-eos"]
    arguments += ["--temperature", "1", "--threads", "1", "--seed", str(seed)]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == answer.text
    assert [point["text"] for point in found["points"]] == [generation.text for generation in answer.points]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(answer.outline.text)
    assert "outline: " in captured.err
    screen = StringIO()
    monkeypatch.setattr(skeleton_command, "stdout", Console(file=screen, force_terminal=True, width=100, height=40))
    assert main(arguments) == 0
    shown = screen.getvalue()
    at = shown.index(answer.outline.text.splitlines()[0])
    for number, title in enumerate(titles(answer.outline.points)):
        assert at < shown.rindex(f"{number}: {' '.join(title.split())[:40]}".rstrip())
    last = shown[shown.rindex("0: ") :]  # when it was drawn for the last time
    assert last.count("done") == len(answer.points)
