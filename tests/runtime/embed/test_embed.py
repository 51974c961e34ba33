"""The C library, used by C and C++ programs that are compiled here, and its options against those of Python's calls."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import Generation, PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import EmbedError, RequestError
from outrider.runtime.embed import build as embed_build
from outrider.runtime.embed.build import BRIDGE, LIBRARY, build
from outrider.runtime.embed.calls import MOST_STOPPING
from outrider.runtime.embed.handles import InvalidArgumentError
from outrider.runtime.embed.handles import Kind as HandleKind
from outrider.runtime.embed.options import OF_MESSAGES, OF_SUBMIT, OFFERED, OPEN_OPTIONS, describe_options, open_options
from outrider.runtime.embed.status import Status

pytest.importorskip("cffi")
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C and a C++ compiler")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")


class Kind(NamedTuple):
    """How the library and a program are compiled, and the environment of the program."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


# Python and ONNX Runtime never free some of their memory, and are built without sanitizers.
WATCHED = Kind(
    ("-fsanitize=address,undefined", "-fno-omit-frame-pointer"),
    {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99", "PYTHONMALLOC": "malloc"},
)
THREADED = Kind(("-fsanitize=thread",), {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=99"})
PLAIN = Kind()  # the programs of `test_bundle.py` are of this kind too


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Builds the library with some flags once."""

    @cache
    def build_once(flags: tuple[str, ...]) -> Path:
        out = tmp_path_factory.mktemp("library")
        build(out, flags=flags)
        return out

    return build_once


@pytest.fixture
def library(libraries: Callable[[tuple[str, ...]], Path]) -> Path:
    return libraries(PLAIN.flags)


def compiled(name: str, library: Path, to: Path, *flags: str) -> Path:
    program = to / Path(name).stem
    compiler = ["c++", "-std=c++17"] if name.endswith(".cc") else ["cc", "-std=c11", "-D_POSIX_C_SOURCE=200809L"]
    lib = library / "lib"
    output(
        *compiler, *WARNINGS, "-g", *flags, f"-I{library / 'include'}", HERE / name, "-o", program,
        f"-L{lib}", "-loutrider", f"-Wl,-rpath,{lib}", "-pthread",
    )  # fmt: skip
    return program


def run(program: Path, *arguments: object, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *map(str, arguments)],
        input=given, capture_output=True, text=True, check=False, env=os.environ | environment, timeout=300,
    )  # fmt: skip


def output(*words: object, cwd: Path | None = None) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def ran(libraries: Callable[[tuple[str, ...]], Path], tmp_path: Path) -> Callable[..., str]:
    """Compile a program against the library of a kind, run it, and return what it prints."""

    def run_program(source: str, kind: Kind, *arguments: object) -> str:
        done = run(compiled(source, libraries(kind.flags), tmp_path, *kind.flags), *arguments, **kind.environment)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
        return done.stdout

    return run_program


# The library.


def test_it_shows_the_calls_of_the_header_and_nothing_else(library: Path) -> None:
    header = (library / "include" / "outrider.h").read_text()
    declared = set(re.findall(r"OUTRIDER_API [\w *]*?(outrider_\w+)\(", header))
    listed = output("nm", "-D", "--defined-only", library / "lib" / LIBRARY)
    assert {line.split()[-1] for line in listed.splitlines()} == declared
    needed = output("readelf", "-d", library / "lib" / LIBRARY)
    assert f"soname: [{LIBRARY}]" in needed
    assert "python" not in needed  # which the bridge brings, when it is needed


def test_numbers_are_those_of_the_header() -> None:
    header = (ROOT / "runtime/embed/outrider.h").read_text()
    statuses = dict(re.findall(r"OUTRIDER_(\w+) = (\d+)", header))
    assert all(int(statuses[status.name]) == status for status in Status)
    bridge = (ROOT / "runtime/embed/bridge.h").read_text()
    kinds = {name: int(number) for name, number in re.findall(r"OUTRIDER_KIND_(\w+) = (\d+)", bridge)}
    assert kinds == {kind.name: kind.value for kind in HandleKind}
    assert BRIDGE in bridge


@pytest.mark.parametrize("language", ["cc -std=c99", "c++ -std=c++11"])
def test_the_header_stands_alone(library: Path, tmp_path: Path, language: str) -> None:
    source = tmp_path / ("only.cc" if "++" in language else "only.c")
    source.write_text("#include <outrider.h>\nint main(void) { return outrider_abi_version(); }\n")
    output(*language.split(), *WARNINGS, f"-I{library / 'include'}", "-c", source, "-o", tmp_path / "only.o")


def test_a_cmake_project_finds_it_where_it_was_moved(library: Path, toy_plan: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    moved = shutil.copytree(library, tmp_path / "moved", symlinks=True)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(Outrider 0.1 CONFIG REQUIRED)\n"
        f"add_executable(chat {ROOT / 'tools/examples/c/chat.c'})\ntarget_link_libraries(chat Outrider::outrider)\n"
    )
    output("cmake", "-B", "made", "-S", ".", f"-DCMAKE_PREFIX_PATH={moved}", cwd=tmp_path)
    output("cmake", "--build", "made", cwd=tmp_path)
    assert run(tmp_path / "made" / "chat", toy_plan, 4, given="import").returncode == 0


# The example.


@pytest.fixture
def chat(library: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(ROOT / "tools" / "examples" / "c", tmp_path / "c")
    output("make", "-s", f"OUTRIDER={library}", cwd=folder)
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


def test_what_is_missing_at_the_start_is_one_sentence(
    library: Path, chat: Path, toy_plan: Path, tmp_path: Path
) -> None:
    nowhere, bare = tmp_path / "nowhere", tmp_path / "bare"
    output(sys.executable, "-m", "venv", "--without-pip", bare)
    moved = shutil.copytree(library, tmp_path / "moved", symlinks=True)
    (moved / "lib" / BRIDGE).unlink()
    for program, home, said in (
        (chat, nowhere, f"there is no Python environment at {nowhere} (OUTRIDER_HOME)"),
        (chat, bare, "No module named '_cffi_backend'"),
        (compiled("again.c", moved, tmp_path), sys.prefix, f"Python cannot be loaded: {moved / 'lib' / BRIDGE}"),
    ):
        done = run(program, toy_plan, 1, OUTRIDER_HOME=str(home))
        assert done.returncode == 1
        assert said in done.stderr
        assert "set OUTRIDER_HOME" in done.stderr
        assert len(done.stderr.splitlines()) == 1


# Calls.


@pytest.mark.parametrize(
    ("source", "kind", "arguments"),
    [
        ("wrong.c", WATCHED, ["toy", "damaged"]),
        ("sessions.c", WATCHED, ["toy"]),
        ("throwing.cc", PLAIN, ["toy", "branches"]),
        ("storm.c", WATCHED, ["branches", "60"]),
        ("storm.c", THREADED, ["branches", "60"]),
        ("fuzz.c", PLAIN, ["damaged", "1", "8000", "1000"]),
    ],
)
def test_programs_that_check_by_themselves(
    source: str,
    kind: Kind,
    arguments: list[str],
    ran: Callable[..., str],
    toy_plan: Path,
    branch_plan: Path,
    tmp_path: Path,
) -> None:
    """Wrong calls; sessions; exceptions of callbacks; threads that destroy each other's requests; mutated input."""
    plans = {"toy": toy_plan, "branches": branch_plan, "damaged": shutil.copytree(toy_plan, tmp_path / "damaged")}
    if source == "wrong.c":
        manifest = plans["damaged"] / "plan.json"
        manifest.write_bytes(manifest.read_bytes()[:-20])
    assert ran(source, kind, *(plans.get(each, each) for each in arguments)) == "ok\n"
    assert {path.name for path in tmp_path.iterdir()} == {"damaged", Path(source).stem}  # nothing else was written


def test_opening_and_closing_keeps_memory_flat(toy_plan: Path, ran: Callable[..., str]) -> None:
    early, late = map(int, ran("again.c", PLAIN, toy_plan, 20).split())
    assert late < 1.05 * early  # a plan that is not released is more than 1 % each time


def test_branches_say_what_they_say_in_python(branch_plan: Path, toy_plan: Path, ran: Callable[..., str]) -> None:
    found = ran("branches.c", WATCHED, branch_plan, toy_plan)
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


def printed(generation: Generation) -> str:
    """What requests.c prints of it."""
    logprobs = generation.logprobs
    words = [*map(str, generation.token_ids), *(f"{each.logprob:.17g}" for each in logprobs)]
    words += [f"{token} {logprob:.17g}" for each in logprobs for token, logprob in each.top]
    return "".join(f"{word} " for word in words) + generation.text


@pytest.mark.parametrize("kind", [WATCHED, pytest.param(THREADED, marks=pytest.mark.long)])
def test_requests_give_together_what_python_gives_alone(
    kind: Kind, branch_plan: Path, tmp_path: Path, ran: Callable[..., str]
) -> None:
    found = ran("requests.c", kind, branch_plan, tmp_path)
    runtime = Runtime.load(branch_plan, threads=1)
    common = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.9, "drafter": "none"}
    expected = [
        runtime.generate(**prompt, **{**common, "seed": 5 + place, **options})
        for place, (prompt, options) in enumerate(REQUESTS)
    ]
    assert found == "".join(printed(generation) + "\0" for generation in expected)
    assert re.fullmatch("[a-z]{3,9}=[0-9]{2};", expected[1].text)


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


# Building.


def test_what_building_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbedError, match=r"cannot be written to .*pass another folder"):
        build(tmp_path / "file" / "out")
    with monkeypatch.context() as patch:
        patch.setattr(embed_build.sysconfig, "get_config_var", lambda name: 0)
        with pytest.raises(EmbedError, match="without a shared library"):
            build(tmp_path / "out")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbedError, match="there is no C compiler on PATH, none of cc, gcc, clang"):
        build(tmp_path / "out")


HEADER = (Path(__file__).parents[3] / "runtime" / "embed" / "outrider.h").read_text(encoding="utf-8")


def keywords(call: object) -> set[str]:
    """Arguments of a method of Python's, without `self`."""
    assert callable(call)
    return {
        each.name
        for each in inspect.signature(call).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    }


def test_every_argument_is_offered() -> None:
    assert [name for name, call in OFFERED.items() if call is None] == []
    assert keywords(Runtime.submit) == {"prompt", "messages", *OF_SUBMIT, *OF_MESSAGES}
    assert keywords(Runtime.load) | {"prefix_cache_tokens"} == {"plan", *OPEN_OPTIONS}


def test_the_header_says_what_each_option_is() -> None:
    assert describe_options() in HEADER
    for key in (*OPEN_OPTIONS, *(each.name for kind in (PrefixCacheConfig, SchedulerConfig) for each in fields(kind))):
        assert f'"{key}"' in HEADER, key


def test_the_defaults_that_the_header_tells_are_those() -> None:
    for kind in (PrefixCacheConfig, SchedulerConfig):
        for each in fields(kind):
            listed = re.search(rf'"{each.name}" \(([\w.*]+)', HEADER.replace("\n * ", " "))
            if listed and listed[1] not in ("at", "of"):
                assert eval(listed[1], {"true": True}) == each.default, each.name  # a number, a product, or a truth


def test_settings_of_cache_and_scheduler_are_pythons() -> None:
    given = open_options(
        '{"scheduler": {"max_running": 2, "overlap": false}, "prefix_cache": {"memory_bytes": 1000000}}'
    )
    assert given["scheduler"] == SchedulerConfig(max_running=2, overlap=False)
    assert given["prefix_cache"] == PrefixCacheConfig(memory_bytes=10**6)
    assert open_options('{"prefix_cache_tokens": 7}') == {"prefix_cache": PrefixCacheConfig(max_cached_tokens=7)}
    assert open_options('{"prefix_cache_tokens": 0}') == {}


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ('{"scheduler": 3}', InvalidArgumentError, "'scheduler' is a JSON object, not 3"),
        ('{"scheduler": {"running": 3}}', InvalidArgumentError, "no option 'running'; the options are max_running"),
        ('{"scheduler": {"max_running": "x"}}', RequestError, "max_running is 'x'"),
        ('{"scheduler": {"overlap": 1}}', InvalidArgumentError, "'scheduler.overlap' is a truth value, not 1"),
        ('{"prefix_cache": {"eviction_target": 2}}', RequestError, "eviction_target is 2"),
        ('{"prefix_cache": {"memory_bytes": true}}', InvalidArgumentError, "is a whole number, not true"),
        ('{"prefix_cache": {}, "prefix_cache_tokens": 9}', InvalidArgumentError, "pass one of them"),
    ],
)
def test_wrong_settings_are_named(given: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        open_options(given)
