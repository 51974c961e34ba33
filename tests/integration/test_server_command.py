"""`outrider serve` as a command: its options, its life, and what it keeps."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import PrefixCacheConfig, Runtime
from outrider.plans.errors import PlanError, RequestError
from outrider.runtime.__main__ import main
from outrider.runtime.server.command import bound_socket
from outrider.runtime.server.service import recall
from tests.integration.served import answers, client_of, wait_until


def test_options_that_exclude_each_other_are_refused(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(toy_plan), "--cache-file", "x", "--no-prefix-cache"]) == 2
    assert "--cache-file is of the prefix cache" in capsys.readouterr().err
    assert main(["serve", str(toy_plan), "--cache-file", "no/where/kept"]) == 2  # before the server has run for days
    assert "there is no folder no/where" in capsys.readouterr().err


@pytest.mark.parametrize("plan", ["branch_plan", pytest.param("toy_plan", marks=pytest.mark.long)])
def test_the_command_serves_until_it_is_told_to_end_and_keeps_its_cache(
    plan: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "outrider.runtime", "serve", str(request.getfixturevalue(plan))]
    command += ["--port", str(port), "--threads", "1"]
    command += ["--cache-file", str(kept), "--cache-tokens", "4096", "--model-name", "toy", "--drain-seconds", "2"]
    for start in range(2):
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
            with client_of(f"http://127.0.0.1:{port}") as client:
                found = client.completions.create(model="toy", prompt=[7, 8, 9] * 10, max_tokens=3)
            assert found.usage is not None
            assert found.usage.prompt_tokens_details is not None
            assert found.usage.prompt_tokens_details.cached_tokens == (29 if start else 0)
        finally:
            server.send_signal(signal.SIGTERM)
            _, said = server.communicate(timeout=60)
        assert server.returncode == 0
        assert kept.exists()
        assert "serving 'toy'" in said
        assert ("are warm" in said) == bool(start)


def test_a_prefix_cache_of_another_plan_is_passed_over(toy_plan: Path, branch_plan: Path, tmp_path: Path) -> None:
    """A new plan starts beside the file that the old one has saved; what is no prefix cache is refused."""
    kept, none = tmp_path / "kept", tmp_path / "none"
    old, new = (Runtime.load(plan, threads=1, prefix_cache=PrefixCacheConfig()) for plan in (toy_plan, branch_plan))
    old.generate([7, 8, 9] * 10, max_new_tokens=3)
    assert old.save_prefix_cache(kept) > 0
    assert "tokens of earlier prompts are warm" in recall(old, kept)
    told = recall(new, kept)
    assert told.startswith("warning: no earlier prompts are warm, and the file is written anew at the end")
    assert "was saved with another plan" in told
    none.write_text("not to be lost")
    with pytest.raises(PlanError, match="no prefix cache"):
        recall(new, none)


def test_the_command_says_what_is_wrong_with_its_options_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    empty, latin = tmp_path / "empty", tmp_path / "latin"
    empty.write_text("# none\n\n")
    latin.write_text("schl\u00fcssel\n", encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option, value, words in (
            ("--port", "70000", "--port is '70000'; pass a whole number from 0 to 65535"),
            ("--port", str(port), f"listens at port {port} of 127.0.0.1 already; pass another --port"),
            ("--host", "", "--host is empty"),
            ("--host", "no.such.host.invalid", "no address that this machine can look up"),
            ("--host", "a" * 70, "no address that this machine can look up"),
            ("--host", "192.0.2.1", "no address of this machine"),
            ("--max-choices", "0", "--max-choices is '0'; pass a"),
            ("--head-seconds", "0", "--head-seconds is '0'; pass a"),
            ("--body-seconds", "inf", "--body-seconds is 'inf'; pass a"),
            ("--send-seconds", "0", "--send-seconds is '0'; pass a"),
            ("--max-connections", "0", "--max-connections is '0'; pass a"),
            ("--max-connections", str(2**40), "open files, and this process may open"),
            ("--max-running", "0", "--max-running is '0'; pass a"),
            ("--max-waiting-per-key", "0", "--max-waiting-per-key is '0'; pass a"),
            ("--prefill-tokens", "0", "--prefill-tokens is '0'; pass a"),
            ("--cache-bytes", "0", "--cache-bytes is '0'; pass a"),
            ("--max-waiting-per-key", "5", "shares the queue among API keys; pass --api-key too, or leave it out"),
            ("--api-key", "", "An API key is empty"),
            ("--api-key-file", str(tmp_path / "none"), f"The file of API keys {tmp_path / 'none'} cannot be read"),
            ("--api-key-file", str(empty), "holds no key; write one a line"),
            ("--api-key-file", str(latin), "characters that a header cannot hold"),
        ):
            more = [] if option == "--port" else ["--port", "0"]
            assert main(["serve", str(tmp_path / "no plan"), option, value, *more]) == 2, option
            assert words in capsys.readouterr().err


def test_a_port_may_be_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(RequestError, match=r"Port 80 is reserved .* pass a --port from 1024 on"):
        bound_socket("127.0.0.1", 80)
