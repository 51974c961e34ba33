"""The container against the package `gguf`, which writes it and reads it again; damage gets a sentence."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.compiler.formats.gguf_file import GgufFile
from outrider.plans.errors import CheckpointError

from .ggufs import close


def write(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.small", 1e-6)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Grüße")
    writer.add_array("a.texts", ["one", "", "zwei"])
    writer.add_array("a.numbers", [1.5, -2.0])
    rng = np.random.default_rng(0)
    writer.add_tensor("floats", rng.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("halves", rng.normal(size=(4, 7)).astype(np.float16))
    for name, shape, kind in (("blocks", (6, 64), Type.Q4_0), ("brain", (2, 8), Type.BF16)):
        rounded = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(name, rounded, raw_dtype=kind)
    close(writer)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def test_file_is_read_as_the_package_reads_it(path: Path) -> None:
    found, oracle = GgufFile.open(path), gguf.GGUFReader(path)
    assert [k for k in oracle.fields if not k.startswith("GGUF.")] == list(found.metadata)
    for key, value in found.metadata.items():
        wanted = oracle.fields[key].contents()
        if isinstance(value, float):
            assert np.float32(value) == np.float32(wanted)
        else:
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == wanted
    assert found.metadata["a.small"] == 1e-6  # as it was written, not 9.999999974752427e-07
    assert [tensor.name for tensor in oracle.tensors] == list(found.tensors)
    for tensor in oracle.tensors:
        own = found.tensors[tensor.name]
        assert own.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert own.type == tensor.tensor_type.name
        data = found.rows(tensor.name) if own.type == "Q4_0" else found.numbers(tensor.name)
        np.testing.assert_array_equal(data.reshape(-1).view(np.uint8), tensor.data.reshape(-1).view(np.uint8))


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as error:
        GgufFile.open(path)
    for part in (str(path), *parts):
        assert part in str(error.value)


def test_other_files_and_types_are_named(path: Path, tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "No such file")
    other, content = tmp_path / "other.gguf", path.read_bytes()
    for changed, said in (
        (b"PK\x03\x04 and more", "does not begin with GGUF"),
        (content[:4] + struct.pack("<I", 1) + content[8:], "GGUF version 1"),
        (content[:4] + struct.pack(">I", 3) + content[8:], "the other byte order"),
    ):
        other.write_bytes(changed)
        refused(other, said)
    writer = gguf.GGUFWriter(other, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 110), np.uint8), raw_dtype=Type.Q3_K)
    close(writer)
    refused(other, "'blk.0.ffn_up.weight' is stored as Q3_K", "read are F32, F16, BF16, Q8_0, Q4_0")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_gets_a_sentence(data: st.DataObject, path: Path) -> None:
    """Truncation is always noticed; any changed bytes of the header either are, or leave a file that can be read."""
    write(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 64))])
        refused(path)
        return
    for place in data.draw(st.lists(st.integers(4, 700), min_size=1, max_size=8)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(CheckpointError):
        GgufFile.open(path)


def test_a_tensor_that_is_cut_off_later_is_named(path: Path) -> None:
    found = GgufFile.open(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="'brain' is cut off"):
        found.numbers("brain")
