"""Skeleton-of-thought: outline, branches and what is kept between them, against the same done by hand."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from plans.errors import RequestError
from plans.skeleton import Skeleton as Settings
from runtime import Runtime
from runtime.__main__ import main
from runtime.cli import skeleton as skeleton_command
from runtime.skeleton.outline import END, outline_grammar, parse_outline
from runtime.skeleton.skeleton import Skeleton, titles

QUESTION = "a module that reads files"
BRANCH = "{point}: {outline}"


@pytest.fixture(scope="module")
def runtime(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "head", "bushy"])
def test_it_is_what_one_would_do_by_hand(runtime: Runtime, drafter: str, mode: str, direct: bool) -> None:
    options = {"max_new_tokens": 10, "drafter": drafter, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    skeleton = Skeleton(runtime, Settings(most_points=3, direct=direct, outline_tokens=40, branch=BRANCH))
    said: dict[int | None, str] = {}
    stream = skeleton.stream(QUESTION, mode=mode, **options)
    while True:
        try:
            each = next(stream)
        except StopIteration as end:
            answer = end.value
            break
        said[each.point] = said.get(each.point, "") + each.text
    tokenizer = runtime.tokenizer
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    form = {"grammar": outline_grammar((), 3, direct=direct)}
    session = runtime.session()
    own = options | {"max_new_tokens": 40, "stop": [END], "ignore_eos": False}
    planned = session.generate(prompt, structured_outputs=form, **own)
    assert answer.planned.token_ids == planned.token_ids
    assert said[None] == planned.text
    if planned.finish_reason == "stop":
        assert answer.outline == parse_outline(planned.text + END)
    assert direct or answer.points
    for place, point in enumerate(answer.outline.points):
        text = f"{point.line}: {answer.outline.text}"
        ids = [*prompt, *tokenizer.encode(text, add_special_tokens=False)]
        expected = runtime.generate(ids, stop=[END], stream_id=place, **options)
        assert answer.points[place].token_ids == expected.token_ids
        assert said[place] == expected.text
    if answer.points:
        assert answer.stats.reused_tokens == len(prompt) - 1
        assert answer.stats.prefill_passes == 0


def test_stops_of_a_caller_are_added_to_the_end_of_a_point(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is a text, a list, an empty one as of the command, or nothing."""
    stops: list[object] = []
    original = Runtime.stream_branches

    def noted(self: Runtime, *arguments: object, **options: object) -> object:
        stops.append(options.get("stop"))
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Runtime, "stream_branches", noted)
    settings = Settings(most_points=3, direct=False, outline_tokens=40, branch=BRANCH)
    for given, expected in (("zz", ["zz", END]), (["a", "b"], ["a", "b", END]), ([], [END]), (None, [END])):
        options = {} if given is None else {"stop": given}
        for seed in range(20):
            answer = Skeleton(runtime, settings).answer(
                QUESTION, seed=seed, temperature=1.0, max_new_tokens=5, **options
            )
            if answer.points:
                break
        assert stops[-1] == expected


def test_a_skeleton_leaves_room_for_its_own_stop(branch_plan: Path) -> None:
    with pytest.raises(RequestError, match="stop holds 16 texts; a skeleton takes at most 15"):
        Skeleton(Runtime.load(branch_plan, threads=1)).answer(QUESTION, stop=["a"] * 16)


def test_the_command_prints_outline_and_points(branch_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["skeleton", str(branch_plan), "--question", QUESTION, "--max-new-tokens", "10", "--ignore-eos"]
    arguments += ["--temperature", "1", "--seed", "3", "--threads", "1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    answer = Skeleton(Runtime.load(branch_plan, threads=1)).answer(
        QUESTION, max_new_tokens=10, ignore_eos=True, temperature=1.0, seed=3
    )
    assert found["text"] == answer.text
    assert [point["text"] for point in found["points"]] == [generation.text for generation in answer.points]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(answer.outline.text if answer.points else answer.text)
    assert "outline: " in captured.err


def test_on_a_terminal_points_grow_below_the_outline(branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=40)
    monkeypatch.setattr(skeleton_command, "stdout", console)
    options = {"max_new_tokens": 10, "ignore_eos": True, "temperature": 1.0}
    settings = Settings(most_points=3, direct=False, outline_tokens=40, branch=BRANCH)
    monkeypatch.setattr(skeleton_command, "Skeleton", lambda runtime: Skeleton(runtime, settings))
    skeleton = Skeleton(Runtime.load(branch_plan, threads=1), settings)
    answers = (skeleton.answer(QUESTION, seed=seed, **options) for seed in range(20))
    seed, answer = next((seed, answer) for seed, answer in enumerate(answers) if answer.points)
    arguments = ["--max-new-tokens", "10", "--ignore-eos", "--temperature", "1", "--seed", str(seed), "--threads", "1"]
    assert main(["skeleton", str(branch_plan), "--question", QUESTION, *arguments]) == 0
    shown = screen.getvalue()
    at = shown.index(answer.outline.text.splitlines()[0])
    for number, title in enumerate(titles(answer.outline.points)):
        head = f"{number}: {' '.join(title.split())[:40]}".rstrip()
        assert at < shown.rindex(head)
    last = shown[shown.rindex("0: ") :]  # when it was drawn for the last time
    assert last.count("done") == len(answer.points)


def test_a_plan_of_one_branch_is_refused(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skeleton", str(toy_plan), "--question", "x"]) == 2
    assert "capacity.branches" in capsys.readouterr().err
