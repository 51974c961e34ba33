"""Other engines run in turn, in processes of their own: what is compared is alike, what is missing has a reason."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outrider import Runtime
from outrider.compiler import __main__ as compiler
from outrider.plans.errors import PlanError
from outrider.plans.plan import read_manifest
from outrider.tools.lab.peers import __main__ as peers
from outrider.tools.lab.peers import measure, process
from outrider.tools.lab.peers.conversion import convert
from outrider.tools.lab.peers.engine import (
    GENAI,
    LLAMA_CPP,
    OPENVINO,
    OURS,
    TRANSFORMERS,
    Generated,
    Settings,
    choose_end_token,
)
from outrider.tools.lab.peers.figures import Generation, Mode, report
from outrider.tools.lab.peers.measure import Missing, Turns
from outrider.tools.lab.peers.plan import build_plan, check_plan
from outrider.tools.lab.peers.process import LostEngineError, Worker, WorkerError, rest
from outrider.tools.parting import Parting
from tests.conftest import TOY_DRAFTERS

PEERS = {
    TRANSFORMERS: ("plain", "prompt-lookup", "assisted"),
    GENAI: ("plain", "ngram", "ngram-adaptive", "ngram-16", "draft"),
    OPENVINO: ("plain", "prompt-lookup", "draft"),
    LLAMA_CPP: ("plain", "prompt-lookup", "draft"),
}
INSTALLED = [engine for engine in PEERS if all(importlib.util.find_spec(each) for each in measure._PACKAGES[engine])]


@pytest.fixture
def compared(workplace: Path, output: Callable[..., str]) -> Callable[..., str]:
    """`tools.lab.peers` on the toy's target."""
    given = ("--prompts", workplace / "held_out.jsonl", "--work", workplace / "build", "--new", 12, "--threads", 1)
    return lambda *more, status=0: output(peers.main, workplace / "target", *given, *more, status=status)


def rename_token(checkpoint: Path, token: int, other: int) -> None:
    """Swap the embeddings of two tokens, so that the model chooses one wherever it chose the other."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"]
    table[[token, other]] = table[[other, token]]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.long
def test_every_engine_gives_the_same_tokens_and_ignores_end_tokens(
    workplace: Path, toy: Runtime, compared: Callable[..., str]
) -> None:
    """Of a checkpoint that chooses an end token early; the plan is built on the way."""
    early = toy.generate("import os\nimport sys\n", drafter="none", max_new_tokens=3, ignore_eos=True).token_ids[-1]
    for folder in ("target", "drafter"):
        for name in ("config.json", "generation_config.json"):
            path = workplace / folder / name
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, early]}))
    found = json.loads(compared("--reps", 2, "--draft", workplace / "drafter", "--json"))
    (section,) = found["precisions"]
    modes = {(row["engine"], row["mode"]): row for row in section["rows"]}
    ours = {(OURS, mode) for mode in ("none", "ngram", "model")}
    assert set(modes) == ours | {(engine, mode) for engine in INSTALLED for mode in PEERS[engine]}
    assert {absent["engine"] for absent in section["missing"]} == set(PEERS) - set(INSTALLED)
    for row in modes.values():
        assert (row["same_runs"], row["runs"], row["differences"], row["agreement"]) == (4, 4, [], 1)
        assert 0 < row["ttft_ms"] < row["e2e_ms"]
    assert modes[OURS, "none"]["speedup"] == 1
    assert section["idle_share"] < 0.5
    assert section["best_ratio"] == min(best["ratio"] for best in section["best"])
    assert (found["threads"], section["precision"], section["prompts"], found["new_tokens"]) == (1, "fp32", 2, 12)


def test_random_checkpoints_that_choose_the_last_id_of_the_vocabulary_run_to_the_end(
    workplace: Path, toy: Runtime, monkeypatch: pytest.MonkeyPatch, compared: Callable[..., str]
) -> None:
    """No id is safe for an engine that must have an end token: random models choose any."""
    pytest.importorskip("onnxruntime_genai")
    monkeypatch.setattr(measure, "_PACKAGES", {GENAI: measure._PACKAGES[GENAI]})
    chosen = toy.generate("import os\nimport sys\n", drafter="none", max_new_tokens=12, ignore_eos=True).token_ids
    prompts = [line["prompt"] for line in map(json.loads, (workplace / "held_out.jsonl").read_text().splitlines())]
    prompted = {token for text in prompts for token in toy.tokenizer.encode(text)}
    often = next(token for token in chosen[1:] if token not in prompted)
    last = toy.manifest.target.vocab_size - 1
    for folder in ("target", "drafter"):
        rename_token(workplace / folder, often, last)
    (section,) = json.loads(compared("--draft", workplace / "drafter", "--reps", 1, "--json"))["precisions"]
    assert section["missing"] == []
    assert {row["mode"] for row in section["rows"] if row["engine"] == GENAI} > {"plain", "ngram", "draft"}
    assert all(row["same_runs"] == row["runs"] == 2 for row in section["rows"])
    (plan,) = (workplace / "build").glob("peers-*/plan")
    assert last in Runtime.load(plan, threads=1).generate(prompts[0], drafter="none", max_new_tokens=12).token_ids


def test_the_end_token_is_the_last_one_that_was_not_generated() -> None:
    assert choose_end_token({1: 1, 8: 1, 9: 1}, 10) == 7
    assert choose_end_token({0: 1, 1: 2, 2: 2}, 3) == 0  # all were: the rarest


def test_what_is_missing_is_listed_with_the_reason(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, compared: Callable[..., str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = compared("--plan", workplace / "plan", "--count", 1, "--reps", 1)
    for engine, packages in measure._PACKAGES.items():
        assert f"missing: {engine}: {packages[0]} is not installed; run `pip install '.[lab]'`" in text
    assert all(f"{OURS} " in text and drafter in text for drafter in TOY_DRAFTERS)


def test_mistakes_are_refused(workplace: Path, compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ("--plan", workplace / "plan")
    for more, said in [
        (("--new", 155), "tokens, but 1 to 5 fit into the plan's context of 160 beside --new 155"),
        (("--draft", workplace / "away"), "away is not a folder; give the folder that holds config.json"),
        (("--task", "chat"), "--task is 'chat', but"),
        (("--precision", "int4"), "is in fp32, which --precision leaves out; leave out that plan as well"),
        (("--precision", "fp32,fp8"), "--precision is 'fp8'; choose from fp32, int8, int4"),
        (plan, "--plan names two plans in fp32"),
    ]:
        assert said in compared(*plan, *more, status=2)
    sections = [{"name": "model", "kind": "model", "checkpoint": "drafter", "weights": {"type": "int8"}}]
    mixed = ["--set", "target.weights={type: int4}", "--set", f"drafters={sections}"]
    assert compiler.main(["build", str(workplace / "model.yaml"), "--out", str(workplace / "mixed"), *mixed]) == 0
    said = "a target in int4 and a draft model (model) in int8"
    assert said in compared("--plan", workplace / "mixed", status=2)
    monkeypatch.setattr(measure, "stores_integers", lambda folder: True)
    assert "target stores weights as integers" in compared(status=2)


def test_a_plan_must_be_of_the_checkpoint_and_one_that_is_built_is_kept(workplace: Path) -> None:
    target = workplace / "target"
    assert check_plan(workplace / "plan", target) == "fp32"
    with pytest.raises(PlanError, match=r"whose files differ from those of .*drafter; pass that one"):
        check_plan(workplace / "plan", workplace / "drafter")
    plan = build_plan(target, None, workplace / "build", "fp32")
    assert [drafter.kind for drafter in read_manifest(plan).drafters] == ["ngram"]
    written = (plan / "plan.json").stat().st_mtime_ns
    assert build_plan(target, None, workplace / "build", "fp32") == plan
    assert (plan / "plan.json").stat().st_mtime_ns == written
    both = build_plan(target, workplace / "drafter", workplace / "build", "int8")
    assert check_plan(both, target) == "int8"
    kept = [(drafter["kind"], drafter.get("weights") is not None) for drafter in read_manifest(both).recipe["drafters"]]
    assert kept == [("ngram", False), ("model", True)]


def mode(engine: str, name: str, *total_ms: float, first: int = 1) -> Mode:
    """Runs of 11 tokens, of which the first came after half of the time."""
    runs = [Generated(list(range(11)), first, ms / 2, ms) for ms in total_ms]
    return Mode(engine, name, [Generation(index % 2, generated) for index, generated in enumerate(runs)])


def test_ratios_are_of_pairs_and_best_meets_best() -> None:
    modes = [
        mode(OURS, "none", 100, 200, 100, 200),
        mode(OURS, "ngram", 50, 100, 50, 100),
        mode(TRANSFORMERS, "plain", 200, 400, 200, 400),
        mode(TRANSFORMERS, "assisted", 150, 500, 150, 250),
        mode(GENAI, "plain", 100, 400, 50, 400),
    ]
    found = report(modes, ["short", "long"])
    assert [row["speedup"] for row in found["rows"]] == [1, 2, 0.5, pytest.approx(2 / 3), 0.75]
    assert found["rows"][1]["tokens_per_second"] == pytest.approx((10 / 0.025 + 10 / 0.050) / 2)
    ratios = {(r["ours"], r["engine"], r["mode"]): r for r in found["ratios"]}
    assert len(ratios) == 6
    plain = ratios["none", TRANSFORMERS, "plain"]
    assert (plain["ratio"], plain["decode_ratio"], plain["ttft_ratio"]) == (2, 2, 2)
    assert [(b["ours"], b["engine"], b["mode"], b["ratio"]) for b in found["best"]] == [
        ("ngram", TRANSFORMERS, "assisted", 3),
        ("ngram", GENAI, "plain", 3),
    ]
    assert found["best"][1]["by_task"] == {"short": 1.5, "long": 4}
    assert (found["best"][1]["ratio_p10"], found["best"][1]["ratio_p90"], found["best_ratio"]) == (1, 4, 3)
    assert [(p["ours"], p["engine"], p["ratio"]) for p in found["plain"]] == [
        ("none", TRANSFORMERS, 2), ("none", GENAI, 1.5),
    ]  # fmt: skip
    assert found["plain_ratio"] == 1.5
    assert mode(OURS, "none", 10, first=11).runs[0].tokens_per_second is None


@pytest.mark.parametrize(
    ("precision", "wrong", "same_runs", "differences"),
    [
        ("fp32", (2, 1), [2, 2, 1], [0, 0, 1]),  # another engine's mode, its second run
        ("int4", (2, 1), [2, 2, 1], [0, 0, 0]),  # whose quantised weights are not ours: counted, and not examined
        ("int4", (1, 1), [2, 1, 2], [0, 1, 0]),
        ("fp32", (0, 3), [3, 4, 4], [1, 0, 0]),  # a repetition of our own plain decoding
    ],
)
def test_tokens_that_differ_are_counted_and_examined_by_prompt(
    precision: Any, wrong: tuple[int, int], same_runs: list[int], differences: list[int]
) -> None:
    times = (1,) * max(same_runs)
    modes = [mode(OURS, "none", *times), mode(OURS, "ngram", *times), mode(GENAI, "plain", *times)]
    modes[wrong[0]].runs[wrong[1]].generated.ids[5] = 99
    ours = SimpleNamespace(part=lambda number, ids, *_: Parting(number, len(ids), 5, 5, 99, 0.25))
    measure._compare(modes, ours, [[1], [2, 3]], precision)  # type: ignore[arg-type]
    rows = report(modes, [None, None])["rows"]
    assert [row["same_runs"] for row in rows] == same_runs
    assert [len(row["differences"]) for row in rows] == differences
    for row in filter(lambda row: row["differences"], rows):
        (found,) = row["differences"]
        assert [found[key] for key in ("prompt", "prompt_tokens", "index", "margin")] == [1, 2, 5, 0.25]
        assert row["agreement"] == pytest.approx(1 - 6 / 11 / len(times))


def test_nothing_is_measured_while_an_idle_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.0, 1000.0, 2000.0, *[2000.0] * 9])  # spins for two glances
    slept = []
    monkeypatch.setattr(process, "sleep", slept.append)
    rest([SimpleNamespace(engine=GENAI, cpu_ms=lambda: next(used))])  # type: ignore[list-item]
    assert len(slept) == 3
    monkeypatch.setattr(process, "_PATIENCE_SECONDS", 0.0)
    spinning = iter(range(0, 10**9, 1000))
    with pytest.raises(LostEngineError, match="the idle process of onnxruntime-genai keeps computing"):
        rest([SimpleNamespace(engine=GENAI, cpu_ms=lambda: float(next(spinning)))])  # type: ignore[list-item]


def test_a_process_that_cannot_load_or_ends_is_reported(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(str(workplace / "target"), str(workplace / "away"), None, 1, 8)
    with pytest.raises(WorkerError, match=r"^.*away is not a plan"):
        Worker(OURS, settings)
    monkeypatch.setattr(process.sys, "executable", shutil.which("false"))
    with pytest.raises(LostEngineError, match="the process of outrider ended: exit status 1"):
        Worker(OURS, settings)


def converter(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> list[set[str]]:
    """onnxruntime-genai's builder replaced by one that writes a file; gives the names of the files it was asked for."""
    seen: list[set[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options["capture_output"]  # nothing for the terminal
        seen.append({file.name for file in Path(command[command.index("-i") + 1]).iterdir()})
        folder = Path(command[command.index("-o") + 1])
        folder.mkdir()
        (folder / "genai_config.json").write_text("{}")
        return subprocess.CompletedProcess(command, status, "Reading\n", "Traceback\nValueError: no such model\n")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_a_conversion_is_kept_for_its_checkpoint_alone(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model without a tokenizer is converted with the target's."""
    seen, target = converter(monkeypatch), workplace / "target"
    first = convert(GENAI, target, workplace, "int4")
    assert convert(GENAI, target, workplace, "int4") == first
    assert len(seen) == 1
    assert (first / "genai_config.json").is_file()
    path = target / "config.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    second = convert(GENAI, target, workplace, "int4")
    assert len({first, second, convert(GENAI, target, workplace, "int8")}) == 3
    draft = workplace / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}", encoding="utf-8")
    convert(GENAI, draft, workplace, "int4", target)
    assert seen[-1] == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in draft.iterdir()} == {"config.json"}


Calls = list[tuple[str, str, int]]


class FakeWorker:
    """Generates at once; before it does, `act` may raise. `calls` has engine, mode and prompt of all workers."""

    def __init__(self, engine: str, modes: list[str], calls: Calls, act: Callable[[str, int], None] | None = None):
        self.engine, self.modes, self.missing, self.version = engine, modes, {"c": "needs a draft model"}, "1"
        self.calls, self._act = calls, act or (lambda mode, times: None)
        self.closed = False

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        self.calls.append((self.engine, mode, ids[0]))
        self._act(mode, sum(call[:2] == (self.engine, mode) for call in self.calls))
        return Generated(list(range(new)), 1, 1.0, float(len(self.calls)))

    def cpu_ms(self) -> float:
        assert not self.closed
        return 0.0

    def close(self) -> None:
        self.closed = True


def failing(failing: str, error: WorkerError, at: int = 1) -> Callable[[str, int], None]:
    """Fail in this mode, when it runs for the `at`-th time."""

    def act(mode: str, times: int) -> None:
        if (mode, times) == (failing, at):
            raise error

    return act


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "sleep", lambda seconds: None)


def run(*workers: FakeWorker, prompts: int = 2, reps: int = 2) -> tuple[Turns, list[tuple[str, str]], list[Missing]]:
    """Turns over `prompts` prompts; the modes that are left, and what is missing."""
    missing: list[Missing] = []
    found = Turns(workers, missing)  # type: ignore[arg-type]
    found.run([[prompt] for prompt in range(prompts)], 4, reps)
    return found, [(mode.engine, mode.name) for mode in found.modes], missing


@pytest.mark.usefixtures("_no_pauses")
def test_engines_alternate_and_every_second_repetition_has_the_reverse_order() -> None:
    calls: Calls = []
    found, names, missing = run(FakeWorker(OURS, ["none", "ngram"], calls), FakeWorker(GENAI, ["plain"], calls))
    there = [(OURS, "none"), (GENAI, "plain"), (OURS, "ngram")]
    order = [(*mode, prompt) for modes in (there, there[::-1]) for prompt in (0, 1) for mode in modes]
    assert calls == [*((*mode, 0) for mode in there), *order]  # a warm-up that does not count
    assert (names, missing) == ([(OURS, "none"), (OURS, "ngram"), (GENAI, "plain")], [])
    assert all([each.prompt for each in mode.runs] == [0, 1, 0, 1] for mode in found.modes)
    assert [each.generated.total_ms for each in found.modes[2].runs] == [5, 8, 11, 14]  # as it was called


@pytest.mark.usefixtures("_no_pauses")
def test_a_mode_that_fails_is_listed_and_all_others_continue() -> None:
    calls: Calls = []
    reason = "onnxruntime-genai (ngram) generated 7 tokens where 12 were asked for"
    peer = FakeWorker(GENAI, ["plain", "ngram"], calls, failing("ngram", WorkerError(reason), at=4))
    found, names, missing = run(FakeWorker(OURS, ["none"], calls), peer)
    assert names == [(OURS, "none"), (GENAI, "plain")]
    assert [len(mode.runs) for mode in found.modes] == [4, 4]
    assert missing == [{"engine": GENAI, "mode": "ngram", "reason": f"prompt 0: {reason}"}]
    assert sum(call[1] == "ngram" for call in calls) == 4
    assert len(report(found.modes, [None, None])["rows"]) == 2


@pytest.mark.usefixtures("_no_pauses")
def test_of_our_own_modes_plain_decoding_alone_must_not_fail() -> None:
    fault = WorkerError("a fault")
    _, names, missing = run(FakeWorker(OURS, ["none", "ngram"], [], failing("ngram", fault)), prompts=1)
    assert names == [(OURS, "none")]
    assert missing == [{"engine": OURS, "mode": "ngram", "reason": "prompt 0: a fault"}]
    with pytest.raises(WorkerError, match="outrider, none: prompt 0: a fault"):
        run(FakeWorker(OURS, ["none", "ngram"], [], failing("none", fault)), prompts=1)


@pytest.mark.usefixtures("_no_pauses")
def test_an_engine_whose_process_ends_or_does_not_rest_leaves_with_all_its_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mode whose turn it was runs, where another engine is at fault."""
    calls: Calls = []
    reason = "the process of transformers ended: exit status -9"
    lost = FakeWorker(TRANSFORMERS, ["plain", "it"], calls, failing("it", LostEngineError(TRANSFORMERS, reason)))
    found, names, missing = run(FakeWorker(OURS, ["none"], calls), lost, FakeWorker(GENAI, ["plain"], calls), reps=1)
    assert names == [(OURS, "none"), (GENAI, "plain")]
    assert [len(mode.runs) for mode in found.modes] == [2, 2]
    assert [tuple(absent.values()) for absent in missing] == [(TRANSFORMERS, None, reason)]
    assert lost.closed
    calls.clear()
    restless = FakeWorker(GENAI, ["plain"], calls)

    def rest(workers: list[FakeWorker]) -> float:
        if restless in workers and calls:
            raise LostEngineError(GENAI, "the idle process of onnxruntime-genai keeps computing")
        return 0.0

    monkeypatch.setattr(measure, "rest", rest)
    _, names, missing = run(FakeWorker(OURS, ["none", "ngram"], calls), restless, prompts=1, reps=1)
    assert calls == [(OURS, "none", 0), (OURS, "ngram", 0)] * 2  # a warm-up first
    assert names == [(OURS, "none"), (OURS, "ngram")]
    assert [absent["engine"] for absent in missing] == [GENAI]
    assert restless.closed
