"""The commands as a user meets them: what they print, what their JSON holds, and how they refuse."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outrider.compiler.__main__
import outrider.runtime.__main__
import outrider.tools.verify.__main__
from outrider import Runtime
from outrider.compiler.models.families import FAMILIES
from outrider.plans.manifest import longest_draft
from tests.conftest import REPOSITORY, TOY_DRAFTERS

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
    toy_recipe: Path, toy_plan: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
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
    found = run_json(capsys, outrider.compiler.__main__.main, "families", "--json")["families"]
    assert [row["model_type"] for row in found] == list(FAMILIES)
    for row in found:
        assert row["model_type"] in shown
    rows = {row["model_type"]: row for row in found}
    assert rows["gemma2"]["attention"] == "full in each 2nd layer, else a window; soft-capped"
    assert rows["smollm3"]["rotation"] == "all but each 4th layer"
    assert rows["qwen3"]["gguf"]


def test_inspect_shows_geometry_programs_ops_and_rules(toy_plan: Path, capsys: Captured) -> None:
    assert outrider.compiler.__main__.main(["inspect", str(toy_plan)]) == 0
    text = capsys.readouterr().out
    for part in (
        "3 layers",
        "KV caches: target 0.29 MB float32, chain ",
        "context 160",
        "speculate.chain",
        "outrider.cpu.BranchAttention 3",
        "FunctionBody",
        "built in ",
        "ends at the tokens 0 ",
    ):
        assert part in text
    assert "{" not in text
    shown = " ".join(text.split())
    assert "ngram ngram trees of up to 6 nodes coupled looks up 1 to 3 tokens, min_confidence 0.25" in shown
    for cells in (
        "chain model chains of 4 coupled",
        "sure model chains of 1 to 6 coupled as long as it is sure, beta 0.3",
        "head eagle3 trees of 12 nodes coupled top_k 4, depth 2",
        "min_confidence 0.25, filler_top_k 3, below 2 tokens head drafts",
    ):
        assert cells in " ".join(text.split())
    found = run_json(capsys, outrider.compiler.__main__.main, "inspect", toy_plan, "--json")
    assert set(found) == {
        "name", "identity", "format_version", "models", "drafters", "backends", "tools", "build", "bytes",
        "files", "end_tokens",
    }  # fmt: skip
    target = found["backends"]["onnxruntime-cpu"]
    assert set(target) == {
        "programs", "symbols", "session_bytes", "kv_caches", "engines", "kernels", "probe", "lowering",
    }  # fmt: skip
    assert any(text.startswith("target: BranchAttention") for text in target["probe"])
    assert target["programs"]["decode"] == ["op:BimMask", "engine:target", "op:Sample"]
    assert target["engines"]["target"]["ops"]["outrider.cpu.BranchAttention"] == 3
    assert target["kv_caches"]["target"] == {"type": "float32", "bytes": 2 * 3 * 2 * 384 * 16 * 4}
    assert target["session_bytes"] > sum(kv["bytes"] for kv in target["kv_caches"].values())


def test_verify_compares_with_pytorch_and_exits_with_the_verdict(toy_plan: Path, capsys: Captured) -> None:
    arguments = [str(toy_plan), "--count", "2", "--new-tokens", "12"]
    held_out = toy_plan.parent / "held_out.jsonl"
    recipe = toy_plan.parent / "with_held_out.yaml"
    text = (toy_plan.parent / "model.yaml").read_text(encoding="utf-8")
    recipe.write_text(f"held_out: {held_out.name}\n{text}", encoding="utf-8")
    assert "held_out" in refused(capsys, outrider.tools.verify.__main__.main(arguments))
    found = run_json(capsys, outrider.tools.verify.__main__.main, *arguments, "--recipe", recipe, "--json")
    assert set(found) == {
        "oracle", "prompts", "tokens", "max_logit_error", "logit_bound", "tolerance", "equal_runs", "divergences",
        "drafters", "sampled", "partial_kv", "quantization", "exactness", "passed",
    }  # fmt: skip
    assert (found["prompts"], found["tokens"], found["passed"]) == (2, 24, True)
    assert set(found["drafters"]) == set(found["sampled"]) == set(TOY_DRAFTERS)
    for drafter in found["drafters"].values():
        assert set(drafter) == {"tokens", "rounds", "equal_runs", "partings", "tokens_per_verify"}
        assert (drafter["tokens"], drafter["equal_runs"], drafter["partings"]) == (24, 2, [])
        assert drafter["tokens_per_verify"] == 24 / drafter["rounds"] >= 1.0
    assert 0 < found["max_logit_error"] < 1e-4
    assert found["tolerance"] == 2 * found["max_logit_error"]
    assert found["logit_bound"] == 1e-3
    assert outrider.tools.verify.__main__.main([*arguments, "--prompts", str(held_out)]) == 0
    text = capsys.readouterr().out
    assert "2 prompts, 24 tokens" in text
    assert "(at most 1e-03)" in text
    assert "the plan agrees" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--count", "0"], "--count is '0'"),
        (["--new-tokens", "159"], "context is 160"),
    ],
)
def test_verify_refuses_numbers_it_cannot_run(
    toy_plan: Path, tmp_path: Path, capsys: Captured, options: list[str], said: str
) -> None:
    recipe = tmp_path / "model.yaml"
    text = (toy_plan.parent / "model.yaml").read_text(encoding="utf-8")
    text = text.replace("checkpoint: ", f"checkpoint: {toy_plan.parent}/")
    recipe.write_text(f"held_out: {toy_plan.parent / 'held_out.jsonl'}\n{text}", encoding="utf-8")
    assert said in refused(
        capsys, outrider.tools.verify.__main__.main([str(toy_plan), "--recipe", str(recipe), *options])
    )


def test_compiler_commands_refuse_with_one_sentence(toy_recipe: Path, tmp_path: Path, capsys: Captured) -> None:
    main = outrider.compiler.__main__.main
    missing = tmp_path / "none.yaml"
    assert str(missing) in refused(capsys, main(["build", str(missing)]))
    wrong = toy_recipe.parent / "wrong.yaml"
    text = toy_recipe.read_text(encoding="utf-8") + "  branchs: 2\n"
    wrong.write_text(text, encoding="utf-8")
    sentence = refused(capsys, main(["build", str(wrong)]))
    assert f"wrong.yaml:{len(text.splitlines())}" in sentence
    assert "branchs" in sentence
    assert "capacity.context" in refused(capsys, main(["build", str(toy_recipe), "--set", "capacity.context=much"]))
    assert "no_such" in refused(capsys, main(["build", str(toy_recipe), "--set", "no_such=1"]))
    assert "is not a plan" in refused(capsys, main(["inspect", str(tmp_path)]))
    assert "is not a plan" in refused(capsys, outrider.tools.verify.__main__.main([str(tmp_path)]))


# generate


@pytest.fixture
def generate(toy: Runtime, toy_plan: Path, monkeypatch: pytest.MonkeyPatch):
    """`python -m outrider.runtime generate` on the toy plan, which is loaded already."""
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: toy)

    def run(*arguments: str) -> int:
        return outrider.runtime.__main__.main(
            ["generate", str(toy_plan), "--max-new-tokens", "24", "--ignore-eos", *arguments]
        )

    return run


def test_generate_prints_text_on_stdout_and_numbers_on_stderr(generate, toy: Runtime, capsys: Captured) -> None:
    expected = toy.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert generate("--prompt", PROMPT) == 0
    printed = capsys.readouterr()
    assert printed.out == expected.text + "\n"
    assert "24 tokens (length)" in printed.err.replace("\n", " ")
    assert generate("--prompt", PROMPT, "--max-new-tokens", "9999", "--ignore-eos") == 0
    assert "(length: the context of 160 tokens is full)" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("options", [[], ["--temperature", "1.1", "--seed", "7", "--top-k", "50", "--top-p", "0.9"]])
def test_stream_prints_what_generate_prints(generate, capsys: Captured, options: list[str]) -> None:
    assert generate("--prompt", PROMPT, *options) == 0
    whole = capsys.readouterr().out
    assert generate("--prompt", PROMPT, "--stream", *options) == 0
    assert capsys.readouterr().out == whole


def test_json_has_stable_keys_and_the_tokens_of_the_runtime(generate, toy: Runtime, capsys: Captured) -> None:
    arguments = ("--prompt", PROMPT, "--temperature", "0.8", "--seed", "3", "--json")
    found = run_json(capsys, lambda a: generate(*a), *arguments)
    expected = toy.generate(PROMPT, max_new_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    assert set(found) == GENERATION_KEYS
    assert (found["text"], found["token_ids"], found["finish_reason"]) == (expected.text, expected.token_ids, "length")
    assert set(found["stats"]) == set(expected.stats.to_json())
    assert {"tokens_per_verify", "acceptance_rate", "ttft_ms", "new_tokens"} <= set(found["stats"])
    streamed = run_json(capsys, lambda a: generate(*a), *arguments, "--stream")
    assert streamed["token_ids"] == found["token_ids"]


def test_options_that_change_logits(generate, toy: Runtime, capsys: Captured) -> None:
    """Each flag becomes its option in `test_options.py`; what options do is in `test_logits_options.py`."""
    arguments = ("--logit-bias", "40=60", "--logit-bias", "41=50", "--bad-word", "H", "--presence-penalty", "-1.5")
    found = run_json(capsys, lambda a: generate(*a), "--prompt", PROMPT, "--json", *arguments)
    options: dict[str, Any] = {"logit_bias": {40: 60.0, 41: 50.0}, "bad_words": ["H"], "presence_penalty": -1.5}
    expected = toy.generate(PROMPT, max_new_tokens=24, ignore_eos=True, drafter="none", **options)
    assert found["token_ids"] == expected.token_ids
    assert expected.token_ids != toy.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids


def test_json_with_logprobs(generate, capsys: Captured) -> None:
    found = run_json(capsys, lambda a: generate(*a), "--prompt", PROMPT, "--json", "--logprobs", "2")
    assert set(found) == GENERATION_KEYS | {"logprobs"}
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    for entry in found["logprobs"]:
        assert len(entry["top"]) == 2
        assert entry["top"][0] == [entry["token_id"], entry["logprob"]]  # greedy


def test_every_way_to_give_the_prompt_gives_the_same(
    generate, toy: Runtime, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
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
        (["--token-ids", ""], "--token-ids is ''"),
        (["--token-ids", "1,,2"], "whole numbers"),
        (["--token-ids", "300"], "vocabulary"),
        (["--token-ids", "-1"], "vocabulary"),
        (["--token-ids", "9" * 5000], "--token-ids"),
        (["--prompt", ""], "empty"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["--prompt-file", "."], "--prompt-file ."),
        (
            ["--prompt-file", "/dev/zero"],
            "--prompt-file /dev/zero cannot be read as UTF-8 text: [Errno 27] it",
        ),
        (["--prompt", "x" * 2000], "context is 160"),
        (["--prompt", "x", "--drafter", "oracle"], ", ".join([*TOY_DRAFTERS, "none"])),
        (["--prompt", "x", "--top-p", "0"], "--top-p"),
        (["--prompt", "x", "--logit-bias", "40"], "--logit-bias is '40'; pass a token id and a number"),
        (["--prompt", "x", "--min-tokens", "25"], "min_tokens is 25"),
    ],
)
def test_generate_refuses_with_one_sentence(generate, capsys: Captured, arguments: list[str], said: str) -> None:
    assert said in refused(capsys, generate(*arguments))


def test_a_form_is_asked_for_in_five_ways(
    toy: Runtime, toy_plan: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grammar", "."], "--grammar . cannot be read"),
        (["--json-schema", "/nowhere/schema.json"], "--json-schema /nowhere/schema.json cannot be read"),
        (["--regex", "a", "--json-object"], "not allowed with"),
        (["--regex", "a"], "ignore_eos is true, and a text that is to have a form"),
        (["--regex", "a", "--beams", "2"], "--regex cannot go with --beams"),
    ],
)
def test_a_form_that_is_none_is_refused(generate, capsys: Captured, arguments: list[str], said: str) -> None:
    assert said in refused(capsys, generate("--prompt", PROMPT, *arguments))


def test_a_missing_plan_an_unknown_target_and_threads_below_0_are_refused(
    toy_plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    main = outrider.runtime.__main__.main
    for command in (["generate", "--prompt", "x"], ["chat"]):
        assert "is not a plan" in refused(capsys, main([command[0], str(tmp_path / "none"), *command[1:]]))
    arguments = ["generate", str(toy_plan), "--prompt", "x"]
    assert "onnxruntime-cpu" in refused(capsys, main([*arguments, "--backend", "tensorrt"]))
    assert "--threads is '-1'" in refused(capsys, main([*arguments, "--threads", "-1"]))


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["generate"], ["generate", "plan"], ["generate", "plan", "--prompt", "x", "--token-ids", "1"],
        ["generate", "plan", "--prompt", "x", "--seed", "x"], ["dance"],
    ],
)  # fmt: skip
def test_a_command_line_that_is_none_is_refused_with_one_line_and_a_hint(
    arguments: list[str], capsys: Captured
) -> None:
    sentence = refused(capsys, outrider.runtime.__main__.main(arguments))
    assert (
        sentence.endswith("; see python -m outrider.runtime --help")
        or "; see python -m outrider.runtime generate --help" in sentence
    )


# chat


def chat(monkeypatch: pytest.MonkeyPatch, toy: Runtime, toy_plan: Path, lines: str, *arguments: str) -> int:
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: toy)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return outrider.runtime.__main__.main(["chat", str(toy_plan), "--max-new-tokens", "10", *arguments])


def test_chat_answers_each_line_as_a_fresh_run_over_the_whole_conversation(
    toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
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


def test_chat_streams_text_and_leaves_at_the_end_of_input(
    toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_turn_that_outgrows_the_context_is_refused_and_the_conversation_goes_on(
    toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = chat(monkeypatch, toy, toy_plan, "long " * 200 + "\nhi\n", "--json", "--max-new-tokens", "4")
    captured = capsys.readouterr()
    assert status == 0
    assert "context is 160" in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.out.splitlines()) == 1  # the reply to the turn that fits


def test_chat_that_cannot_begin_ends_with_one_sentence(
    toy: Runtime, toy_plan: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nope" in refused(capsys, chat(monkeypatch, toy, toy_plan, "hi\nmore\n", "--drafter", "nope"))
    monkeypatch.setattr(toy.tokenizer, "_chat_template", None)
    assert "no chat template" in refused(capsys, chat(monkeypatch, toy, toy_plan, "hi\nmore\n"))


# As processes: what only a real one shows.


def process(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=120, **options,
    )  # fmt: skip


def test_a_process_reads_standard_input_and_keeps_stdout_for_the_text(toy: Runtime, toy_plan: Path) -> None:
    ended = process(
        "runtime", "generate", toy_plan, "--prompt-file", "-", "--max-new-tokens", 12, "--ignore-eos", input=PROMPT
    )
    assert ended.returncode == 0
    assert ended.stdout == toy.generate(PROMPT, max_new_tokens=12, ignore_eos=True).text + "\n"
    assert re.search(r"^12 tokens \(length\), .*, first token after [\d.]+ ms$", ended.stderr, re.MULTILINE)


def test_chat_as_a_process_answers_before_it_is_asked_again(toy_plan: Path) -> None:
    """A program on the other end of the pipe waits for the reply before it writes on."""
    command = [sys.executable, "-m", "outrider.runtime", "chat", str(toy_plan), "--json", "--max-new-tokens", "5"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as talk:
        assert talk.stdin is not None
        assert talk.stdout is not None
        for line in ("hi", "more"):
            talk.stdin.write(line + "\n")
            talk.stdin.flush()
            assert set(json.loads(talk.stdout.readline())) == GENERATION_KEYS
        talk.stdin.close()
        assert talk.wait(timeout=60) == 0
