"""The C library, used by C and C++ programs that are compiled here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import Generation, Runtime
from outrider.plans.errors import EmbedError
from outrider.runtime.__main__ import main
from outrider.runtime.embed import build as embed_build
from outrider.runtime.embed.build import BRIDGE, LIBRARY, build
from outrider.runtime.embed.calls import MOST_STOPPING, Kind, Status

pytest.importorskip("cffi")
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C and a C++ compiler")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
# Python and ONNX Runtime never give some memory back, and are not built to be watched.
WATCHED = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99", "PYTHONMALLOC": "malloc"}
SANITIZE = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer")
SANITIZE_THREADS = ("-fsanitize=thread",)
WATCHED_THREADS = {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=99"}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("library")
    build(out)
    return out


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with its own frames under AddressSanitizer."""
    out = tmp_path_factory.mktemp("watched")
    build(out, flags=SANITIZE)
    return out


@pytest.fixture(scope="session")
def threaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with its own accesses under ThreadSanitizer."""
    out = tmp_path_factory.mktemp("threaded")
    build(out, flags=SANITIZE_THREADS)
    return out


KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {  # `test_bundle.py` runs programs of the plain one
    "library": ("library", (), {}),
    "watched": ("watched", SANITIZE, WATCHED),
    "threaded": ("threaded", SANITIZE_THREADS, WATCHED_THREADS),
}


def compiled(name: str, library: Path, to: Path, *flags: str) -> Path:
    program = to / Path(name).stem
    compiler = ["c++", "-std=c++17"] if name.endswith(".cc") else ["cc", "-std=c11", "-D_POSIX_C_SOURCE=200809L"]
    lib = library / "lib"
    command = [
        *compiler, *WARNINGS, "-g", *flags, f"-I{library / 'include'}", str(HERE / name), "-o", str(program),
        f"-L{lib}", "-loutrider", f"-Wl,-rpath,{lib}", "-pthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: object, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *map(str, arguments)],
        input=given, capture_output=True, text=True, check=False, env=os.environ | environment, timeout=300,
    )  # fmt: skip


def passes(program: Path, *arguments: object, **environment: str) -> str:
    done = run(program, *arguments, **environment)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def damaged(toy_plan: Path, tmp_path: Path) -> Path:
    plan = shutil.copytree(toy_plan, tmp_path / "damaged")
    manifest = plan / "plan.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    return plan


# The library.


def test_it_shows_the_calls_of_the_header_and_nothing_else(library: Path) -> None:
    header = (library / "include" / "outrider.h").read_text()
    declared = set(re.findall(r"OUTRIDER_API [\w *]*?(outrider_\w+)\(", header))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library / "lib" / LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in listed.splitlines()} == declared
    assert len(declared) == 50
    needed = subprocess.run(
        ["readelf", "-d", str(library / "lib" / LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    assert f"soname: [{LIBRARY}]" in needed
    assert "python" not in needed  # which the bridge brings, when it is needed


def test_numbers_are_those_of_the_header() -> None:
    header = (HERE / "../../../runtime/embed/outrider.h").resolve().read_text()
    statuses = dict(re.findall(r"OUTRIDER_(\w+) = (\d+)", header))
    for status in Status:
        assert int(statuses[status.name]) == status
    bridge = (HERE / "../../../runtime/embed/bridge.h").resolve().read_text()
    assert {name: int(number) for name, number in re.findall(r"OUTRIDER_KIND_(\w+) = (\d+)", bridge)} == {
        kind.name: int(kind) for kind in Kind
    }
    assert BRIDGE in bridge


@pytest.mark.parametrize(
    "language", [["cc", "-std=c99"], ["cc", "-std=c11"], ["c++", "-std=c++11"], ["c++", "-std=c++20"]]
)
def test_the_header_stands_alone(library: Path, tmp_path: Path, language: list[str]) -> None:
    source = tmp_path / ("only.cc" if language[0] == "c++" else "only.c")
    source.write_text(
        "#include <outrider.h>\n#include <outrider.h>\nint main(void) { return outrider_abi_version(); }\n"
    )
    command = [*language, *WARNINGS, f"-I{library / 'include'}", "-c", str(source), "-o", str(tmp_path / "only.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cmake_project_finds_it_wherever_it_lies(library: Path, toy_plan: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    moved = shutil.copytree(library, tmp_path / "moved", symlinks=True)
    assert run(made_by_cmake(moved, tmp_path), toy_plan, 4, given="import").returncode == 0


def made_by_cmake(prefix: Path, folder: Path) -> Path:
    """The example, built in `folder` by CMake, which finds the library at `prefix`."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(Outrider 0.1 CONFIG REQUIRED)\n"
        f"add_executable(chat {ROOT / 'tools/examples/c/chat.c'})\ntarget_link_libraries(chat Outrider::outrider)\n"
    )
    for command in (["cmake", "-B", "made", "-S", ".", f"-DCMAKE_PREFIX_PATH={prefix}"], ["cmake", "--build", "made"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "made" / "chat"


# The example.


@pytest.fixture
def chat(library: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(ROOT / "tools" / "examples" / "c", tmp_path / "c")
    done = subprocess.run(
        ["make", "-s", f"OUTRIDER={library}"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "chat"


def test_the_example_says_what_python_says(chat: Path, reference_plan: Path, reference: Runtime) -> None:
    lines = ["import os\n", "def main(argv):\n"]
    for options in ((40,), (40, 0.8, 5), (30, 1.0, 2**64 - 1)):
        session = reference.session()
        names = ("max_new_tokens", "temperature", "seed")
        expected = [session.generate(line, **dict(zip(names, options, strict=False))).text for line in lines]
        found = run(chat, reference_plan, *options, given="".join(lines))
        assert found.returncode == 0, found.stderr
        assert found.stdout == "".join(text + "\n" for text in expected)


def test_the_examples_are_short(chat: Path) -> None:
    for name, most in (("chat.c", 60), ("serve_many.c", 90)):
        assert len((chat.parent / name).read_text().splitlines()) <= most


def test_the_example_of_many_says_what_python_says(chat: Path, branch_plan: Path) -> None:
    lines = [f"{word} {number}\n" for number, word in enumerate(("import", "def main", "class", "x =") * 5)]
    found = run(chat.parent / "serve_many", branch_plan, 12, given="".join(lines))
    assert found.returncode == 0, found.stderr
    runtime, expected = Runtime.load(branch_plan), []
    for number, line in enumerate(lines, 1):
        generation = runtime.generate(line, max_new_tokens=12, logprobs=0)
        expected.append(f"{number} ({sum(each.logprob for each in generation.logprobs):.3f}): {generation.text}")
    together = "\n".join(expected).replace("\r\n", "\n").replace("\r", "\n")  # as `run` reads them
    assert sorted(found.stdout.split("\n")[:-1]) == sorted(together.split("\n"))


def test_a_missing_environment_is_a_sentence(chat: Path, toy_plan: Path, tmp_path: Path) -> None:
    done = run(chat, toy_plan, OUTRIDER_HOME=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error 6: there is no Python environment at {tmp_path / 'nowhere'} (OUTRIDER_HOME)")
    assert "set OUTRIDER_HOME" in done.stderr


def test_an_environment_without_outrider_is_a_sentence(chat: Path, toy_plan: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    done = run(chat, toy_plan, OUTRIDER_HOME=str(tmp_path / "bare"))
    assert done.returncode == 1
    assert done.stderr.startswith("error 6: Outrider cannot be started in ")
    assert "No module named '_cffi_backend'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_its_bridge_it_says_so(library: Path, toy_plan: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(library, tmp_path / "moved", symlinks=True)
    (moved / "lib" / BRIDGE).unlink()
    done = run(compiled("again.c", moved, tmp_path), toy_plan, 1)
    assert done.returncode == 1
    assert f"Python cannot be loaded: {moved / 'lib' / BRIDGE}" in done.stderr


# Calls.


@pytest.fixture
def ran(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Compile a program against the library of a kind, run it, and return what it prints."""

    def run(source: str, kind: str, *arguments: object) -> str:
        fixture, flags, environment = KINDS[kind]
        program = compiled(source, request.getfixturevalue(fixture), tmp_path, *flags)
        return passes(program, *arguments, **environment)

    return run


@pytest.mark.parametrize(
    ("source", "kind", "plans"),
    [
        ("wrong.c", "watched", ["toy_plan", "damaged"]),
        ("sessions.c", "watched", ["toy_plan"]),
        ("throwing.cc", "library", ["toy_plan", "branch_plan"]),
    ],
)
def test_programs_that_check_by_themselves(
    source: str, kind: str, plans: list[str], ran: Callable[..., str], request: pytest.FixtureRequest
) -> None:
    """Statuses and sentences of what is wrong; sessions, callbacks and threads; exceptions of callbacks."""
    assert ran(source, kind, *map(request.getfixturevalue, plans)) == "ok\n"


def test_branches_say_what_they_say_in_python(branch_plan: Path, toy_plan: Path, ran: Callable[..., str]) -> None:
    found = ran("branches.c", "watched", branch_plan, toy_plan)
    runtime = Runtime.load(branch_plan, threads=1)
    ruled = {"prompt": [9, 8], "logit_bias": {40: 9}, "bad_words": ["H"], "presence_penalty": 1}
    branches = [" os", {"prompt": " sys", "temperature": 1.0, "seed": 4}, ruled]
    options = {"max_new_tokens": 9, "ignore_eos": True}
    expected = runtime.generate_branches("import", branches, **options)
    expected += runtime.generate_branches([5, 6, 7], n=4, **options)
    assert found == "".join(f"{generation.text}\0" for generation in expected)


def only_letters(tokens: list[int], logits: NDArray[np.float32]) -> None:
    """As requests.c has it."""
    logits[: 66 + len(tokens) % 3] = logits[91:] = -np.inf


# As requests.c has them, each on its own and without drafts.
REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": "import"}, {"logprobs": 3, "temperature": 0.0}),
    ({"prompt": "import"}, {"ignore_eos": False, "structured_outputs": {"regex": "[a-z]{3,9}=[0-9]{2};"}}),
    ({"prompt": [5, 6, 7, 8]}, {}),
    ({"messages": [{"role": "user", "content": "import"}]}, {}),
    ({"prompt": "import"}, {"generated": [41, 42, 43], "logprobs": 0}),
    ({"prompt": "import"}, {"logits_processors": [only_letters]}),
]


def told(generation: Generation) -> str:
    """What requests.c prints of it."""
    logprobs = generation.logprobs
    words = [*map(str, generation.token_ids), *(f"{each.logprob:.17g}" for each in logprobs)]
    words += [f"{token} {logprob:.17g}" for each in logprobs for token, logprob in each.top]
    return "".join(f"{word} " for word in words) + generation.text


@pytest.mark.parametrize("kind", ["watched", pytest.param("threaded", marks=pytest.mark.long)])
def test_requests_give_together_what_python_gives_alone(
    kind: str, branch_plan: Path, tmp_path: Path, ran: Callable[..., str]
) -> None:
    found = ran("requests.c", kind, branch_plan, tmp_path)
    runtime = Runtime.load(branch_plan, threads=1)
    common = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.9, "drafter": "none"}
    expected = [
        runtime.generate(**prompt, **{**common, "seed": 5 + place, **options})
        for place, (prompt, options) in enumerate(REQUESTS)
    ]
    assert found == "".join(told(generation) + "\0" for generation in expected)
    assert re.fullmatch("[a-z]{3,9}=[0-9]{2};", expected[1].text)


@pytest.mark.parametrize("kind", ["watched", "threaded"])
def test_threads_submit_read_cancel_and_destroy_at_once(kind: str, branch_plan: Path, ran: Callable[..., str]) -> None:
    assert ran("storm.c", kind, branch_plan, 60) == "ok\n"


@pytest.mark.parametrize(
    ("source", "milliseconds"),
    [
        ("main", 40),
        ("callback", 20),
        ("logits", 20),
        *(pytest.param("main", n, marks=pytest.mark.long) for n in (0, 150)),
    ],
)
def test_a_process_may_end_while_it_generates(
    library: Path, branch_plan: Path, tmp_path: Path, source: str, milliseconds: int
) -> None:
    done = run(compiled("leave.c", library, tmp_path), branch_plan, milliseconds, source)
    assert (done.returncode, done.stderr) == (3, "")
    assert time.time() - int(done.stdout) / 1000 < MOST_STOPPING  # it has waited for nothing that does not end


def test_opening_and_closing_keeps_memory_flat(library: Path, toy_plan: Path, tmp_path: Path) -> None:
    early, late = map(int, passes(compiled("again.c", library, tmp_path), toy_plan, 20).split())
    assert late < 1.05 * early  # of which a plan that is not given back is more than 1 % each time


def test_mutated_plans_and_options_are_refused_or_run(library: Path, toy_plan: Path, tmp_path: Path) -> None:
    plan = shutil.copytree(toy_plan, tmp_path / "plan")
    assert passes(compiled("fuzz.c", library, tmp_path), plan, 1, 8000, 1000) == "ok\n"
    assert {path.name for path in tmp_path.iterdir()} == {"plan", "fuzz"}  # nothing was written beside it


# Building.


def test_the_command_lists_what_it_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider.runtime", "embed", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(file) for file in json.loads(done.stdout)]
    assert all(file.exists() for file in files)
    assert {file.name for file in files} >= {"outrider.h", LIBRARY, "outrider.pc", "OutriderConfig.cmake"}


def test_the_example_of_a_bundle_has_pkg_config_find_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell runs the example of `--help`, with stand-ins for the compiler and pkg-config."""
    with pytest.raises(SystemExit):
        main(["embed", "--help"])
    (example,) = re.findall(r"`(cc .*?)`", " ".join(capsys.readouterr().out.split()).replace("- ", "-"))
    for name, body in (("cc", 'echo "$@"'), ("pkg-config", 'echo "found:$PKG_CONFIG_PATH"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    said = subprocess.run(
        ["/bin/sh", "-c", example], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    ).stdout
    assert said == "app.c found:build/bundle/lib/pkgconfig -Wl,-rpath,$ORIGIN/bundle/lib -o build/app\n"


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbedError, match=r"cannot be written to .*pass another folder"):
        build(tmp_path / "file" / "out")


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbedError, match="there is no C compiler on PATH, none of cc, gcc, clang"):
        build(tmp_path / "out")


def test_a_python_without_a_shared_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_build.sysconfig, "get_config_var", lambda name: 0)
    with pytest.raises(EmbedError, match="without a shared library"):
        build(tmp_path / "out")
