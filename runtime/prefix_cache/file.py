"""A prefix cache in a file, so that system prompts are warm at the start.

    8 bytes     OUTRPFX1
    32 bytes    sha256 of all that follows
    8 bytes     length of the header, little-endian
    header      JSON: what the KV belongs to, and the tree's edges
    payload     edge by edge, KV of every model, `[planes, heads, tokens, size]`, and states: parts, then records

KV is worth something only after the very weights, engines and arithmetic that computed them: a file is bound to all
of these, and refused elsewhere. It is checked whole before anything of it is inserted, and holds data alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.plans import names
from outrider.plans.errors import PlanError, RequestError
from outrider.plans.kv_slots import are_finite
from outrider.runtime.files import written_whole
from outrider.runtime.kv.memory import HostKv
from outrider.runtime.kv.state import Snapshot
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.prefix_cache.page_pool import TokenShape

_MAGIC = b"OUTRPFX1"
_START = 48  # of the header
_MOST_HEADER = 2**28


class OtherCacheError(PlanError):
    """A whole prefix cache, of another plan, machine or build."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Edge(_Strict):
    """An edge of the tree: its parent's place in the list (-1: its owner's root), how many tokens have KV, by model,
    and how many records each state has, by how many of the tokens it comes after."""

    parent: int = Field(ge=-1)
    owner: str = ""
    tokens: list[int] = Field(min_length=1)
    terminal: bool
    valid: dict[str, int]
    states: dict[int, int] = {}


class _Shape(_Strict):
    planes: int = Field(ge=1)
    heads: int = Field(ge=1)
    size: int = Field(ge=1)
    dtype: str


class _Header(_Strict):
    bound_to: dict[str, str]
    shapes: dict[str, _Shape]
    edges: list[_Edge]
    payload_bytes: int = Field(ge=0)


def save_prefix_cache(cache: PrefixCache, path: Path, bound_to: Mapping[str, str]) -> int:
    """Write the whole cache to `path`, atomically; return the number of tokens.

    Raises RequestError where `path` is in no folder.
    """
    check_folder(path)
    edges, pieces = cache.export()
    header = _Header(
        bound_to=dict(bound_to),
        shapes=_described(cache.shapes),
        edges=[_Edge.model_validate(edge) for edge in edges],
        payload_bytes=sum(piece.nbytes for piece in pieces),
    )
    text = header.model_dump_json().encode()
    text = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(text)
    for piece in pieces:
        digest.update(piece.data)
    with written_whole(path) as file:
        file.write(_MAGIC + digest.digest() + text)
        for piece in pieces:
            file.write(piece.data)
    return sum(len(edge.tokens) for edge in header.edges)


def check_folder(path: Path) -> None:
    """Raise RequestError unless a file at `path` could be saved in a folder that is there."""
    if not path.parent.is_dir():
        raise RequestError(
            f"The prefix cache cannot be saved to {path}: there is no folder {path.parent}. Make it, or name another "
            "file."
        )


def load_prefix_cache(cache: PrefixCache, path: Path, bound_to: Mapping[str, str], context: int) -> int:
    """Insert the contents of the file, sequences of at most `context` tokens; return how many tokens the cache has
    more.

    Raises OtherCacheError for a file that was not made by this plan on such a machine, and PlanError for one that is
    not whole.
    """
    try:
        if not path.is_file():  # nor a device, or a pipe
            raise OSError("it is no file")
        if np.fromfile(path, np.uint8, len(_MAGIC)).tobytes() != _MAGIC:  # before it is read, however large it may be
            raise PlanError(f"{path} is no prefix cache, or damaged; remove it, or save it again.")
        data = np.fromfile(path, np.uint8)  # not mapped: a file truncated meanwhile would raise SIGBUS
    except (OSError, MemoryError) as error:
        raise PlanError(f"{path} cannot be read as a prefix cache: {error}. Remove it, or save it again.") from None
    header, start = _read_header(path, data)
    _check(path, header, cache.shapes, bound_to)
    payload = data[start:]
    _check_payload(path, header, payload, cache, context)
    return _insert_all(cache, header, payload)


def _described(shapes: Mapping[str, TokenShape]) -> dict[str, _Shape]:
    return {
        name: _Shape(planes=s.planes, heads=s.heads, size=s.size, dtype=np.dtype(s.dtype).name)
        for name, s in sorted(shapes.items())
    }


def _read_header(path: Path, data: NDArray[np.uint8]) -> tuple[_Header, int]:
    length = int.from_bytes(data[40:48].tobytes(), "little")
    if data[:8].tobytes() != _MAGIC or length > min(_MOST_HEADER, len(data) - _START):
        raise PlanError(f"{path} is no prefix cache, or damaged; remove it, or save it again.")
    if hashlib.sha256(data[40:].data).digest() != data[8:40].tobytes():
        raise PlanError(f"{path} is damaged: its sha256 is another. Remove it, or save it again.")
    try:
        return _Header.model_validate_json(data[_START : _START + length].tobytes()), _START + length
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the header"
        raise PlanError(f"{path}, {where}: {first['msg']}; remove the file, or save it again.") from None


def _check(path: Path, header: _Header, shapes: Mapping[str, TokenShape], bound_to: Mapping[str, str]) -> None:
    for what in sorted({*bound_to, *header.bound_to}):
        here, there = bound_to.get(what), header.bound_to.get(what)
        if here != there:
            raise OtherCacheError(
                f"{path} was saved with another {what}: {there}, and here it is {here}. Its KV would differ in its "
                "last bits, or be wrong; save it again here."
            )
    if header.shapes != _described(shapes):
        raise PlanError(f"{path} holds KV of other shapes than this plan's; save it again here.")


def _check_payload(path: Path, header: _Header, payload: NDArray[np.uint8], cache: PrefixCache, context: int) -> None:
    expected, lengths, shapes = 0, list[int](), cache.shapes
    for place, edge in enumerate(header.edges):
        known = set(edge.valid) <= set(shapes) and min(edge.tokens) >= 0 and edge.parent < place
        above = header.edges[edge.parent] if known and edge.parent >= 0 else None
        lengths.append(len(edge.tokens) + (0 if above is None else lengths[edge.parent]))
        if not known or lengths[place] > context or (above is not None and above.owner != edge.owner):
            raise PlanError(f"{path}, edges.{place}: it does not belong there; remove the file, or save it again.")
        for name, count in edge.valid.items():
            if not 0 <= count <= len(edge.tokens):
                raise PlanError(
                    f"{path}, edges.{place}: KV of {count} of its {len(edge.tokens)} tokens; save it again."
                )
            size = count * shapes[name].nbytes
            kv = payload[expected : expected + size]
            if len(kv) == size and not are_finite(kv.view(shapes[name].dtype).reshape(-1, shapes[name].size)):
                raise PlanError(f"{path}, edges.{place}: KV that is not finite; remove the file, or save it again.")
            expected += size
        for after, records in edge.states.items():
            most = min((shape.most for shape in cache.state_shapes), default=-1)
            if not (0 < after <= after + records <= len(edge.tokens)) or records > most:
                raise PlanError(f"{path}, edges.{place}: a state after {after} of its tokens; save it again.")
            size = 4 * sum(map(prod, _shapes_of_state(cache, records)))
            state = payload[expected : expected + size]
            if len(state) == size and not np.isfinite(state.view(np.float32)).all():
                raise PlanError(f"{path}, edges.{place}: a state that is not finite; remove the file.")
            expected += size
    if not expected == header.payload_bytes == len(payload):
        raise PlanError(
            f"{path} has {len(payload)} bytes of KV, and its header says {expected}: it was cut, or damaged. "
            "Remove it, or save it again."
        )


def _insert_all(cache: PrefixCache, header: _Header, payload: NDArray[np.uint8]) -> int:
    """Insert every sequence: first those with KV that no other leads on from, then where others end among them."""
    offset, kv, before = 0, list[dict[str, NDArray[Any]]](), cache.get_cached_tokens()
    states = list[list[Snapshot]]()  # by edge, whose base counts from the edge's start
    for edge in header.edges:
        own = {}
        for name in sorted(edge.valid):
            shape, count = cache.shapes[name], edge.valid[name]
            flat = payload[offset : offset + count * shape.nbytes].view(shape.dtype)
            own[name] = flat.reshape(shape.planes, shape.heads, count, shape.size)
            offset += count * shape.nbytes
        kv.append(own)
        states.append([])
        for after, records in edge.states.items():
            arrays = []
            for extents in _shapes_of_state(cache, records):
                arrays.append(payload[offset : offset + 4 * prod(extents)].view(np.float32).reshape(extents).copy())
                offset += arrays[-1].nbytes
            kinds = len(cache.state_shapes)
            states[-1].append(Snapshot(after, tuple(arrays[:kinds]), tuple(arrays[kinds:])))
    parents = {edge.parent for edge in header.edges}
    for place, edge in enumerate(header.edges):
        if place not in parents:
            path = _path(header, place)
            sources = {name: _leading(header, path, kv, name) for name in cache.shapes}
            found = {name: (each.shape[2], TokenKv(HostKv(each))) for name, each in sources.items() if each is not None}
            tokens = _tokens(header, path)
            if names.TARGET in found and found[names.TARGET][0] == len(tokens):
                cache.insert(tokens, found, edge.owner, states=_states_along(header, path, states))
    for place, edge in enumerate(header.edges):
        if (
            edge.terminal
            and place in parents
            and cache.contains(tokens := _tokens(header, _path(header, place)), edge.owner)
        ):
            cache.insert(tokens, {}, edge.owner)
    return cache.get_cached_tokens() - before


def _shapes_of_state(cache: PrefixCache, records: int) -> list[tuple[int, ...]]:
    """Return the shapes of a snapshot's arrays: parts, then records."""
    parts, logs = zip(*(shape.snapshot_shapes(records) for shape in cache.state_shapes), strict=True)
    return [*parts, *logs]


def _states_along(header: _Header, path: list[int], states: list[list[Snapshot]]) -> list[Snapshot]:
    found, start = [], 0
    for place in path:
        found += [replace(each, base=start + each.base) for each in states[place]]
        start += len(header.edges[place].tokens)
    return found


def _tokens(header: _Header, path: list[int]) -> list[int]:
    return [token for each in path for token in header.edges[each].tokens]


def _leading(header: _Header, path: list[int], kv: list[dict[str, NDArray[Any]]], name: str) -> NDArray[Any] | None:
    """KV of a model for the leading tokens of a path, up to the first gap."""
    parts = []
    for place in path:
        own = kv[place].get(name)
        if own is None:
            break
        parts.append(own)
        if own.shape[2] < len(header.edges[place].tokens):
            break
    return np.concatenate(parts, 2) if parts else None


def _path(header: _Header, place: int) -> list[int]:
    path = []
    while place >= 0:
        path.append(place)
        place = header.edges[place].parent
    return path[::-1]
