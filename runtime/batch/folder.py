"""The folder of a batch: parts as they are computed, and in the end `results.jsonl`.

    batch.json      what the results depend on; a run that continues must agree with it
    parts/N.jsonl   the results of block N, written as a whole
    parts/N.begun   what actors have of it before: a line "." whenever one begins it, and results as they come
    results.jsonl   all results by id, written as a whole when there are all parts, which then go
    lock            held by the run

A block is a run of requests that stand together in the working order. Where blocks end depends on the number of
requests and the options of the first run, so that any later run continues with the same ones.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from outrider.plans.errors import BusyError, PlanError, RequestError
from outrider.runtime.batch.requests import BatchRequest, id_order
from outrider.runtime.files import locked, written_whole

VERSION = 2
"""Of batch.json, raised when what is in it, or how blocks are made, changes."""
_STATE, _PARTS, _RESULTS, _LOCK = "batch.json", "parts", "results.jsonl", "lock"
KEPT = "What is written stays: run the same command again to continue from there."
_BEGINS = b"."  # a line
_MODE = 0o666  # of files, less the umask: a cluster's workers may be of another user
_LEAST = 16  # requests of a block
_MOST_BLOCKS = 4096
_MOST_OPEN = 64  # files of parts


@dataclass(frozen=True)
class BatchState:
    """What the results of a batch depend on, and what its blocks were made by.

    `requests` is the digest of all of them, `plan` the plan's identity, `kernels` what `kernels_here` says of the
    machine that began; `count` requests come in blocks of at most `block_size`. `release` is Outrider's version: others
    may answer otherwise.
    """

    plan: str
    requests: str
    model: str
    created: int
    backend: str
    kernels: dict[str, str]
    count: int
    block_size: int
    version: int = VERSION
    release: str = field(default_factory=partial(metadata.version, "outrider"))

    def differences(self, other: BatchState) -> list[str]:
        """What `other` has differently, in words; blocks may be."""
        said = {
            "version": "a version of Outrider with another form of batches wrote them",
            "release": f"Outrider {self.release} wrote them, and this one is {other.release}",
            "plan": f"they are of the plan {self.plan[:12]}, and this one is {other.plan[:12]}",
            "requests": "the requests are others",
            "count": f"they are of {self.count} requests, and now there are {other.count}",
            "model": f"they name the model {self.model!r}, and now it is {other.model!r}",
            "created": f"they have the time {self.created}, and SOURCE_DATE_EPOCH now says {other.created}",
            "backend": f"they ran on {self.backend}, and now it is {other.backend}",
        }
        return [words for key, words in said.items() if getattr(self, key) != getattr(other, key)]


def default_block_size(count: int, branches: int) -> int:
    """The requests that a plan of `branches` serves at once, and no more than some thousand blocks in all."""
    return max(_LEAST, branches, count // _MOST_BLOCKS)


def block_bounds(count: int, block_size: int) -> list[tuple[int, int]]:
    """Beginnings and ends of blocks."""
    return [(start, min(start + block_size, count)) for start in range(0, count, block_size)]


@dataclass(frozen=True)
class Totals:
    """Sums of a batch: results with status 200 and others, and the tokens of the former."""

    succeeded: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


class BatchFolder:
    """The folder at `path`, for writers of parts. `BatchFolder.begun` opens it for a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / _RESULTS
        self._parts = path / _PARTS

    @contextmanager
    def begun(self, state: BatchState) -> Iterator[BatchState]:
        """Hold the folder for a run, which begins a batch or continues the same one; yields its state as it is kept.

        Raises RequestError for a folder that has anything else, or another batch, and BusyError where a run holds it.
        Raises OSError where it cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RequestError(f"{self.path} is no folder; choose another one.")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / _LOCK).exists():
            raise RequestError(f"{self.path} is not empty, and holds no batch; choose another folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_own()
        try:
            with locked(self.path / _LOCK, wait=False):
                self._parts.mkdir(exist_ok=True)  # the lock is there first: a folder without it is not ours
                self._clear()
                yield self._agreed(state)
        except BlockingIOError:
            raise BusyError(f"Another run writes {self.path}; wait until it has ended, or end it.") from None

    def _check_own(self) -> None:
        """Raise RequestError where something of the folder's is not in it, or no file: nothing else is touched."""
        files = [self.path / name for name in (_LOCK, _STATE, _RESULTS)]
        if self._parts.is_dir() and not self._parts.is_symlink():
            files += self._parts.iterdir()
        for path in (self._parts, *files):
            there = os.path.lexists(path)
            if there and (path.is_symlink() or not (path.is_dir() if path == self._parts else path.is_file())):
                raise RequestError(
                    f"{path} is a link, or not of its kind, and a batch keeps all of its own in its folder; choose "
                    "another folder."
                )

    def _clear(self) -> None:
        """Remove what a run that was killed had not finished writing, and who began its blocks."""
        for left in (*self.path.glob(".*.json*"), *self._parts.glob(".*.jsonl.*"), *self._parts.glob(".*.begun.*")):
            left.unlink(missing_ok=True)
        for path in self._parts.glob("*.begun"):
            lines = [line for line in path.read_bytes().split(b"\n") if line and line != _BEGINS]
            with written_whole(path, mode=_MODE) as file:
                file.writelines(line + b"\n" for line in lines)

    def _agreed(self, state: BatchState) -> BatchState:
        kept = self.state()
        if kept is None:
            if any(self._parts.iterdir()) or self.results.exists():
                raise RequestError(f"{self.path} has results and no {_STATE}; choose another folder.")
            with written_whole(self.path / _STATE, mode=_MODE) as file:
                file.write(json.dumps(asdict(state), indent=1).encode() + b"\n")
            return state
        if different := kept.differences(state):
            raise RequestError(
                f"{self.path} has results that this run would not give: {'; '.join(different)}. Choose another folder, "
                "or delete this one."
            )
        return kept

    def state(self) -> BatchState | None:
        """What the folder's results depend on; None where there is no batch. Raises PlanError for a damaged file."""
        path = self.path / _STATE
        try:
            found = TypeAdapter(BatchState).validate_json(path.read_bytes(), strict=True)
            if found.block_size < 1 or found.count < 0:
                raise ValueError(f"it has {found.count} requests in blocks of {found.block_size}")
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = ": ".join((*map(str, first["loc"]), first["msg"]))
            raise PlanError(f"{path} cannot be read: {reason}; choose another folder, or delete this one.") from None

    def written(self) -> set[int]:
        """Numbers of the blocks whose results are there."""
        return {int(part.stem) for part in self._parts.glob("*.jsonl") if part.stem.isascii() and part.stem.isdigit()}

    def write(self, block: int, lines: Iterable[bytes]) -> None:
        """Write the results of a block. Raises OSError."""
        with written_whole(self._part(block), mode=_MODE) as file:
            file.writelines(lines)
        self._part(block).with_suffix(".begun").unlink(missing_ok=True)

    @contextmanager
    def beginning(self, block: int) -> Iterator[tuple[int, dict[str, bytes], IO[bytes]]]:
        """For an actor that begins a block, and may die of it: how many have in this run, it included; the results by
        id that those before it had; and a file for its own, a line each. Raises OSError."""
        path = self._part(block).with_suffix(".begun")
        with path.open("a+b") as file:
            file.write(b"\n" + _BEGINS + b"\n")  # after a line that a kill has cut off, too
            file.seek(0)
            found, lines = dict[str, bytes](), file.read().split(b"\n")
            for line in lines:
                with suppress(PlanError):
                    found[_read(line, path)["custom_id"]] = line + b"\n"
            yield lines.count(_BEGINS), found, file

    def finish(self, blocks: Sequence[Sequence[BatchRequest]]) -> Totals:
        """Put all results together, ordered by id, and remove the parts; return the totals.

        Where that is done already, the results are only read. Raises PlanError for a part, or results, that are not
        those of their requests, and OSError.
        """
        if not self.results.exists():
            places = [place for number, block in enumerate(blocks) for place in self._places(number, block)]
            places.sort(key=lambda place: id_order(place[0]))
            with written_whole(self.results, mode=_MODE) as results:
                self._copy(places, results)
        totals = self._totals(sum(map(len, blocks)))
        shutil.rmtree(self._parts, ignore_errors=True)
        return totals

    def _part(self, block: int) -> Path:
        return self._parts / f"{block:06}.jsonl"

    def _places(self, number: int, block: Sequence[BatchRequest]) -> Iterator[tuple[str, int, int, int]]:
        """Ids of a part's results, and where each lies: the part, and the place and length in bytes."""
        path, offset, found = self._part(number), 0, list[tuple[str, int, int, int]]()
        with path.open("rb") as file:
            for line in file:
                found.append((_read(line, path)["custom_id"], number, offset, len(line)))
                offset += len(line)
        if [place[0] for place in found] != [request.custom_id for request in block]:
            raise PlanError(f"{path} does not have the results of its requests; delete it, and run the batch again.")
        return iter(found)

    def _copy(self, places: Iterable[tuple[str, int, int, int]], results: Any) -> None:
        """Write the results at `places`, which come from all parts by turns: the last used of these stay open."""
        files = OrderedDict[int, IO[bytes]]()
        try:
            for _, number, offset, length in places:
                if number not in files:
                    files[number] = self._part(number).open("rb")
                files.move_to_end(number)
                if len(files) > _MOST_OPEN:
                    files.popitem(last=False)[1].close()
                files[number].seek(offset)
                results.write(files[number].read(length))
        finally:
            for file in files.values():
                file.close()

    def _totals(self, count: int) -> Totals:
        succeeded = failed = prompt = new = 0
        with self.results.open("rb") as file:
            for line in file:
                response = _read(line, self.results)["response"]
                if response["status_code"] != 200:
                    failed += 1
                    continue
                succeeded += 1
                prompt += response["body"]["usage"]["prompt_tokens"]
                new += response["body"]["usage"]["completion_tokens"]
        if succeeded + failed != count:
            raise PlanError(
                f"{self.results} has {succeeded + failed} results of {count}; delete it, and run the batch again."
            )
        return Totals(succeeded, failed, prompt, new)


def _read(line: bytes, path: Path) -> Any:
    try:
        found = json.loads(line)
        found["custom_id"], found["response"]["body"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PlanError(f"{path} has a line that is no result; delete it, and run the batch again.") from None
    return found
