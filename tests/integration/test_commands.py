"""The commands: their output, their JSON, and their refusals."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import outrider.compiler.__main__
import outrider.runtime.__main__
import outrider.tools.command
import outrider.tools.verify.__main__
from outrider import Runtime
from outrider.compiler.models.families import FAMILIES
from outrider.plans.manifest import longest_draft
from outrider.runtime.__main__ import main
from outrider.runtime.cli import branches as branch_command
from tests.conftest import TOY_DRAFTERS

Patch = pytest.MonkeyPatch
PROMPT = "def add(a, b):\n"
GENERATION_KEYS = {"text", "token_ids", "finish_reason", "seed", "stats"}

Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, status: int) -> str:
    """The sentence on stderr of a command that ended with status 2, stdout being empty."""
    assert status == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    (sentence,) = (line for line in printed.err.splitlines() if line.startswith("error: "))
    return sentence


def run_json(capsys: Captured, main, *arguments: object) -> dict:
    """The one JSON object that a command prints."""
    assert main([str(a) for a in arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


# build, inspect, verify


def test_build_prints_a_line_and_the_same_as_json(toy_recipe: Path, toy_plan: Path, capsys: Captured) -> None:
    assert outrider.compiler.__main__.main(["build", str(toy_recipe), "--out", str(toy_plan)]) == 0
    printed = capsys.readouterr()
    assert "reused: plan" in printed.out
    assert "unchanged" in printed.err
    found = run_json(capsys, outrider.compiler.__main__.main, "build", toy_recipe, "--out", toy_plan, "--json")
    assert set(found) == {"plan", "identity", "reused", "backends", "bytes", "seconds"}
    assert found["reused"] == ["plan"]
    assert found["identity"] == json.loads((toy_plan / "plan.json").read_text(encoding="utf-8"))["identity"]


def test_build_puts_the_plan_under_build_and_takes_overrides(
    toy_recipe: Path, toy_plan: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy_plan, tmp_path / "build" / "toy")  # its engines are taken over: this is about the command
    arguments = ("build", toy_recipe, "--set", "drafters[0].max_draft=3", "--set", "capacity.context=200", "--json")
    found = run_json(capsys, outrider.compiler.__main__.main, *arguments)
    assert found["plan"] == str(Path("build") / "toy")
    assert found["reused"] == ["onnxruntime-cpu"]
    manifest = Runtime.load(tmp_path / "build" / "toy").manifest
    assert (longest_draft(manifest.drafters[:1]), manifest.target.context) == (3, 200)


def test_families_are_those_that_are_compiled(capsys: Captured) -> None:
    assert outrider.compiler.__main__.main(["families"]) == 0
    shown = capsys.readouterr().out
    rows = run_json(capsys, outrider.compiler.__main__.main, "families", "--json")["families"]
    assert [row["model_type"] for row in rows] == list(FAMILIES)
    assert all(row["model_type"] in shown for row in rows)
    (gemma2,) = (row for row in rows if row["model_type"] == "gemma2")
    assert gemma2["attention"] == "full in each 2nd layer, else a window; soft-capped"


def test_inspect_shows_geometry_programs_ops_and_rules(toy_plan: Path, capsys: Captured) -> None:
    assert outrider.compiler.__main__.main(["inspect", str(toy_plan)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("3 layers", "KV caches: target 0.29 MB float32", "head eagle3 trees of 12 nodes coupled top_k 4"):
        assert part in shown
    found = run_json(capsys, outrider.compiler.__main__.main, "inspect", toy_plan, "--json")
    assert set(found) == {
        "name", "identity", "format_version", "models", "drafters", "backends", "tools", "build", "bytes",
        "files", "end_tokens",
    }  # fmt: skip
    target = found["backends"]["onnxruntime-cpu"]
    assert target["programs"]["decode"] == ["op:BimMask", "engine:target", "op:Sample"]
    assert target["kv_caches"]["target"] == {"type": "float32", "bytes": 2 * 3 * 2 * 384 * 16 * 4}
    assert target["session_bytes"] > sum(kv["bytes"] for kv in target["kv_caches"].values())


def test_verify_compares_with_pytorch_and_exits_with_the_verdict(toy_plan: Path, capsys: Captured) -> None:
    main = outrider.tools.verify.__main__.main
    arguments = [str(toy_plan), "--count", "2", "--new-tokens", "12"]
    held_out = toy_plan.parent / "held_out.jsonl"
    recipe = toy_plan.parent / "with_held_out.yaml"
    text = (toy_plan.parent / "model.yaml").read_text(encoding="utf-8")
    recipe.write_text(f"held_out: {held_out.name}\n{text}", encoding="utf-8")
    assert "held_out" in refused(capsys, main(arguments))
    for options, said in ((["--count", "0"], "--count is '0'"), (["--new-tokens", "159"], "context is 160")):
        assert said in refused(capsys, main([str(toy_plan), "--recipe", str(recipe), *options]))
    found = run_json(capsys, main, *arguments, "--recipe", recipe, "--json")
    assert set(found) == {
        "oracle", "prompts", "tokens", "max_logit_error", "logit_bound", "tolerance", "equal_runs", "divergences",
        "drafters", "sampled", "partial_kv", "quantization", "exactness", "passed",
    }  # fmt: skip
    assert (found["prompts"], found["tokens"], found["passed"]) == (2, 24, True)
    assert set(found["drafters"]) == set(found["sampled"]) == set(TOY_DRAFTERS)
    assert all(drafter["equal_runs"] == 2 for drafter in found["drafters"].values())
    assert 0 < found["max_logit_error"] < 1e-4
    assert main([*arguments, "--prompts", str(held_out)]) == 0
    assert "the plan agrees" in capsys.readouterr().out


def test_compiler_commands_refuse_with_one_sentence(toy_recipe: Path, tmp_path: Path, capsys: Captured) -> None:
    main = outrider.compiler.__main__.main
    missing, wrong = tmp_path / "none.yaml", toy_recipe.parent / "wrong.yaml"
    text = toy_recipe.read_text(encoding="utf-8") + "  branchs: 2\n"
    wrong.write_text(text, encoding="utf-8")
    for arguments, said in (
        (["build", str(missing)], str(missing)),
        (["build", str(wrong)], f"wrong.yaml:{len(text.splitlines())}"),
        (["build", str(toy_recipe), "--set", "capacity.context=much"], "capacity.context"),
        (["build", str(toy_recipe), "--set", "no_such=1"], "no_such"),
        (["inspect", str(tmp_path)], "is not a plan"),
    ):
        assert said in refused(capsys, main(arguments))
    assert "is not a plan" in refused(capsys, outrider.tools.verify.__main__.main([str(tmp_path)]))


# generate


@pytest.fixture
def generate(toy: Runtime, toy_plan: Path, monkeypatch: Patch):
    """`python -m outrider.runtime generate` on the toy plan, which is loaded already."""
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: toy)
    command = ["generate", str(toy_plan), "--max-new-tokens", "24", "--ignore-eos"]
    return lambda *arguments: outrider.runtime.__main__.main([*command, *arguments])


def test_generate_prints_text_on_stdout_and_numbers_on_stderr(generate, toy: Runtime, capsys: Captured) -> None:
    expected = toy.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert generate("--prompt", PROMPT) == 0
    printed = capsys.readouterr()
    assert printed.out == expected.text + "\n"
    assert re.search(r"24 tokens \(length\), .*, first token after [\d.]+ ms$", printed.err.replace("\n", " ").strip())
    assert generate("--prompt", PROMPT, "--max-new-tokens", "9999", "--ignore-eos") == 0
    assert "(length: the context of 160 tokens is full)" in capsys.readouterr().err.replace("\n", " ")
    assert generate("--prompt", PROMPT, "--drafter", "chain", "--debug") == 0
    assert re.search(r"^ +\d+ ([+-]'.*'\(.*\) )+= '.*'$", capsys.readouterr().err, re.MULTILINE)


def test_stream_prints_the_text_of_generate(generate, capsys: Captured) -> None:
    options = ("--prompt", PROMPT, "--temperature", "1.1", "--seed", "7", "--top-k", "50", "--top-p", "0.9")
    assert generate(*options) == 0
    whole = capsys.readouterr().out
    assert generate(*options, "--stream") == 0
    assert capsys.readouterr().out == whole


def test_json_has_stable_keys_and_the_tokens_of_the_runtime(generate, toy: Runtime, capsys: Captured) -> None:
    arguments = ("--prompt", PROMPT, "--temperature", "0.8", "--seed", "3", "--json")
    found = run_json(capsys, lambda a: generate(*a), *arguments)
    expected = toy.generate(PROMPT, max_new_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    assert set(found) == GENERATION_KEYS
    assert (found["text"], found["token_ids"], found["finish_reason"]) == (expected.text, expected.token_ids, "length")
    assert set(found["stats"]) == set(expected.stats.to_json())
    streamed = run_json(capsys, lambda a: generate(*a), *arguments, "--stream", "--logprobs", "2")
    assert set(streamed) == GENERATION_KEYS | {"logprobs"}
    assert [entry["token_id"] for entry in streamed["logprobs"]] == streamed["token_ids"] == found["token_ids"]
    assert [len(entry["top"]) for entry in streamed["logprobs"]] == [2] * 24


def test_every_way_to_give_the_prompt_gives_the_same(
    generate, toy: Runtime, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    (tmp_path / "prompt.txt").write_bytes(PROMPT.encode())
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    ids = ",".join(map(str, toy.tokenizer.encode(PROMPT)))
    outputs = []
    for way in (
        ["--prompt", PROMPT], ["--prompt-file", str(tmp_path / "prompt.txt")], ["--prompt-file", "-"],
        ["--token-ids", ids], ["--token-ids", ids.replace(",", " , ")],
    ):  # fmt: skip
        assert generate(*way) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--token-ids", "1,x"], "--token-ids is '1,x'"),
        (["--token-ids", "300"], "vocabulary"),
        (["--token-ids", "9" * 5000], "--token-ids"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["--prompt-file", "/dev/zero"], "--prompt-file /dev/zero cannot be read as UTF-8 text: [Errno 27] it"),
        (["--prompt", PROMPT, "--grammar", "."], "--grammar . cannot be read"),
        (["--prompt", PROMPT, "--regex", "a", "--json-object"], "not allowed with"),
        (["--prompt", PROMPT, "--regex", "a"], "ignore_eos is true, and a text that is to have a form"),
        (["--prompt", PROMPT, "--regex", "a", "--beams", "2"], "--regex cannot go with --beams"),
        (["--prompt", "x", "--drafter", "oracle"], ", ".join([*TOY_DRAFTERS, "none"])),
        (["--prompt", "x", "--logit-bias", "40"], "--logit-bias is '40'; pass a token id and a number"),
    ],
)
def test_generate_refuses_with_one_sentence(generate, capsys: Captured, arguments: list[str], said: str) -> None:
    assert said in refused(capsys, generate(*arguments))


def test_a_form_is_asked_for_in_five_ways(
    toy: Runtime, toy_plan: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: toy)
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["a", "é"]}', encoding="utf-8")
    grammar.write_text('start: "x" "y"+', encoding="utf-8")
    for arguments, form in (
        (["--json-schema", str(schema)], {"json": {"enum": ["a", "é"]}}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "[0-9]{5}"], {"regex": "[0-9]{5}"}),
        (["--grammar", str(grammar)], {"grammar": 'start: "x" "y"+'}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
    ):
        command = ["generate", str(toy_plan), "--prompt", PROMPT, "--max-new-tokens", "9", *arguments]
        assert outrider.runtime.__main__.main(command) == 0
        expected = toy.generate(PROMPT, max_new_tokens=9, structured_outputs=form)
        assert capsys.readouterr().out == expected.text + "\n"


def test_a_missing_plan_and_an_unknown_backend_are_refused(toy_plan: Path, tmp_path: Path, capsys: Captured) -> None:
    main = outrider.runtime.__main__.main
    for command in (["generate", "--prompt", "x"], ["chat"]):
        assert "is not a plan" in refused(capsys, main([command[0], str(tmp_path / "none"), *command[1:]]))
    arguments = ["generate", str(toy_plan), "--prompt", "x"]
    assert "onnxruntime-cpu" in refused(capsys, main([*arguments, "--backend", "tensorrt"]))


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("serve PLAN", "h11", "serve"),
        ("serve PLAN --telemetry --port 0", "opentelemetry.sdk", "telemetry"),
        ("serve-ray PLAN", "ray", "ray"),
        ("batch PLAN requests.parquet --out out", "pyarrow", "ray"),
        ("batch PLAN requests.jsonl --out out --ray local", "ray", "ray"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    command: str, missing: str, extra: str, toy_plan: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.parquet").write_bytes(b"PAR1")
    (tmp_path / "requests.jsonl").write_text('{"custom_id": "a", "body": {}}\n')
    importing = [f"outrider.runtime.server.{name}" for name in ("connections", "tracing")]
    for name in [name for name in sys.modules if name in importing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    said = refused(capsys, outrider.tools.command.main(command.replace("PLAN", str(toy_plan)).split()))
    assert f"needs {missing}" in said
    assert f"'.[{extra}]'" in said


@pytest.mark.parametrize("arguments", [[], ["generate", "plan"], ["generate", "plan", "--seed", "x"], ["dance"]])
def test_a_wrong_command_line_is_refused_with_one_line_and_a_hint(arguments: list[str], capsys: Captured) -> None:
    sentence = refused(capsys, outrider.runtime.__main__.main(arguments))
    assert re.search("; see python -m outrider.runtime (generate )?--help", sentence)


# chat


def chat(monkeypatch: Patch, toy: Runtime, toy_plan: Path, lines: str, *arguments: str) -> int:
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: toy)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return outrider.runtime.__main__.main(["chat", str(toy_plan), "--max-new-tokens", "10", *arguments])


def test_chat_answers_as_a_fresh_run_over_the_whole_conversation(
    toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    assert chat(monkeypatch, toy, toy_plan, "hi\nmore\n\nnot read\n", "--json", "--system", "be brief") == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [set(reply) for reply in replies] == [GENERATION_KEYS] * 2
    messages = [{"role": "system", "content": "be brief"}]
    for line, reply in zip(("hi", "more"), replies, strict=True):
        messages.append({"role": "user", "content": line})
        ids = toy.tokenizer.encode(toy.tokenizer.apply_chat_template(messages), add_special_tokens=False)
        assert toy.generate(ids, max_new_tokens=10).token_ids == reply["token_ids"]
        messages.append({"role": "assistant", "content": reply["text"]})
    assert replies[1]["stats"]["reused_tokens"] > 0


def test_chat_streams_text(toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: Patch) -> None:
    assert chat(monkeypatch, toy, toy_plan, "hi\n", "--json") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert chat(monkeypatch, toy, toy_plan, "hi\n") == 0
    assert text in capsys.readouterr().out
    assert chat(monkeypatch, toy, toy_plan, "so\n/reset\nhi\n", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["text"] == text
    arguments = ("generate", toy_plan, "--message", "hi", "--max-new-tokens", "10", "--json")
    one = run_json(capsys, outrider.runtime.__main__.main, *arguments)
    assert one["text"] == text
    assert "--message cannot go with --beams" in refused(
        capsys, outrider.runtime.__main__.main(["generate", str(toy_plan), "--message", "hi", "--beams", "2"])
    )


def test_a_turn_that_outgrows_the_context_is_refused(
    toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    assert chat(monkeypatch, toy, toy_plan, "long " * 200 + "\nhi\n", "--json", "--max-new-tokens", "4") == 0
    captured = capsys.readouterr()
    assert "context is 160" in captured.err
    assert len(captured.out.splitlines()) == 1  # the reply to the turn that fits


def test_chat_that_cannot_begin_is_refused(toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: Patch) -> None:
    assert "nope" in refused(capsys, chat(monkeypatch, toy, toy_plan, "hi\nmore\n", "--drafter", "nope"))
    monkeypatch.setattr(toy.tokenizer, "_chat_template", None)
    assert "no chat template" in refused(capsys, chat(monkeypatch, toy, toy_plan, "hi\nmore\n"))


def test_chat_as_a_process_answers_before_it_is_asked_again(toy_plan: Path) -> None:
    """A program on the other end of the pipe waits for the reply before it writes on."""
    command = [sys.executable, "-m", "outrider.runtime", "chat", str(toy_plan), "--json", "--max-new-tokens", "5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8") as talk:
        assert talk.stdin is not None
        assert talk.stdout is not None
        for line in ("hi", "more"):
            talk.stdin.write(line + "\n")
            talk.stdin.flush()
            assert set(json.loads(talk.stdout.readline())) == GENERATION_KEYS
        talk.stdin.close()
        assert talk.wait(timeout=60) == 0


OPTIONS = ("--max-new-tokens", "9", "--ignore-eos", "--threads", "1", "--drafter", "head")


def found_in_python(plan: Path, **options: object) -> list[str]:
    runtime = Runtime.load(plan, threads=1)
    shared = {"max_new_tokens": 9, "ignore_eos": True, "drafter": "head"}
    return [result.text for result in runtime.generate_branches("import", **shared, **options)]


def test_json_has_every_branch_and_its_cost(branch_plan: Path, capsys: Captured) -> None:
    arguments = ["branches", str(branch_plan), "--prompt", "import", "--branch", " os", "--branch", " sys"]
    assert main([*arguments, *OPTIONS, "--mode", "batching", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [branch["text"] for branch in found["branches"]] == found_in_python(branch_plan, branches=[" os", " sys"])
    assert found["stats"]["new_tokens"] == 18
    assert found["stats"]["bytes_copied"] > 0


def test_samples_differ_and_are_printed_in_order(branch_plan: Path, capsys: Captured) -> None:
    arguments = ["branches", str(branch_plan), "--prompt", "import", "--n", "3", "--temperature", "1", *OPTIONS]
    arguments += ["--seed", "0"]
    expected = found_in_python(branch_plan, n=3, temperature=1.0, seed=0)
    assert len(set(expected)) > 1
    for more in ([], ["--stream"]):
        assert main([*arguments, *more]) == 0
        captured = capsys.readouterr()
        assert captured.out == "".join(f"{text}\n" for text in expected)
        assert "branch 2, 'sample 2' (length):" in captured.err
        assert "27 tokens in" in captured.err


def test_on_a_terminal_they_grow_side_by_side(branch_plan: Path, monkeypatch: Patch) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=40)
    monkeypatch.setattr(branch_command, "stdout", console)
    arguments = ["branches", str(branch_plan), "--prompt", "import", "--branch", " os", "--branch", " sys", "--stream"]
    assert main([*arguments, *OPTIONS]) == 0
    shown = screen.getvalue()
    assert shown.index("0: os") < shown.index("1: sys") < shown.index("length")


def test_greedy_samples_are_refused(branch_plan: Path, capsys: Captured) -> None:
    assert main(["branches", str(branch_plan), "--prompt", "import", *OPTIONS, "--n", "2"]) == 2
    assert "Greedy samples are all the same" in capsys.readouterr().err
