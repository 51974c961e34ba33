"""The container, its blocks and its metadata against the package `gguf`, which writes them; damage gets a sentence."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.compiler.formats.gguf_blocks import BLOCK_TYPES
from outrider.compiler.formats.gguf_config import read_gguf_config
from outrider.compiler.formats.gguf_file import GgufFile, Value
from outrider.compiler.formats.gguf_tokenizer import read_gguf_text
from outrider.plans.errors import CheckpointError
from outrider.plugins.quant_layout import QuantLayout, pack, unpack
from outrider.plugins.reference import dequantize

from .ggufs import close, stored_as


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


KINDS = tuple(BLOCK_TYPES)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_packages_bit_for_bit(kind: str) -> None:
    for size in (1e-3, 1.0, 300.0):
        weight = (np.random.default_rng(3).normal(size=(6, 512)) * size).astype(np.float32)
        rows = stored_as(kind, weight, 7)
        found = BLOCK_TYPES[kind].numbers_of(rows)
        np.testing.assert_array_equal(found, gguf.quants.dequantize(rows, Type[kind]))


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"Q6_K"}))  # Q6_K alone has no form of blocks of 32
def test_integers_and_scales_survive_packing_bit_for_bit(kind: str) -> None:
    rows = stored_as(kind, np.random.default_rng(4).normal(size=(21, 256)).astype(np.float32), 8)
    block = BLOCK_TYPES[kind]
    made = block.quantized(rows)
    layout = QuantLayout(*made.integers.shape, block.bits, block.wide, block.minimums)
    packed = pack(made.integers, made.scales, made.minimums, layout)
    integers, scales, minimums = unpack(packed, layout)
    np.testing.assert_array_equal(dequantize(integers, scales, minimums), gguf.quants.dequantize(rows, Type[kind]))


OTHERS: tuple[Value, ...] = (
    -1, 0, 3, 2**64 - 1, 2.5, float("nan"), float("inf"), "text", "", True, False, [], ["text"], np.arange(3),
    np.ones(2, np.float32), np.zeros(1, bool), np.array([], np.uint8),
)  # fmt: skip
WITHOUT_DIVISORS: dict[str, Value] = {
    "llama.attention.key_length": 4,
    "llama.attention.value_length": 4,
    "llama.rope.dimension_count": 4,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
}
EXTRA: dict[str, Value] = {
    "split.count": 1,
    "llama.expert_count": 0,
    "llama.attention.causal": True,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.original_context_length": 64,
    "llama.rope.scaling.yarn_beta_fast": 32.0,
    "llama.rope.scaling.yarn_beta_slow": 1.0,
    "llama.vocab_size": 8,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 10000.0,
    **{f"tokenizer.ggml.{role}_token_id": 1 for role in ("bos", "eos", "eot", "eom", "unknown")},
    **{f"tokenizer.ggml.add_{what}": True for what in ("bos_token", "eos_token", "space_prefix")},
    "tokenizer.chat_template": "{{ messages }}",
}


def written(path: Path, tokenizer: dict[str, Value], rope_freqs: bool) -> GgufFile:
    """A file with every key that is read, `tokenizer`'s among them; or with divisors of frequencies, and fewer keys."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
    close(writer)
    file = GgufFile.open(path)
    return replace(file, metadata={**file.metadata, **EXTRA, **({} if rope_freqs else WITHOUT_DIVISORS), **tokenizer})


TOKENS: dict[str, Value] = {
    "tokenizer.ggml.tokens": ["<s>", "</s>", "<unk>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": np.array([3, 3, 2, 1, 1, 1], np.int32),
}
BYTES = TOKENS | {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["a b"],
}  # fmt: skip
SCORES = np.array([0, 0, 0, -2, -1, -0.5], np.float32)
PIECES = TOKENS | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": SCORES}


def sentence_of(read: Callable[[GgufFile], object], file: GgufFile) -> str | None:
    try:
        read(file)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("tokenizer", "rope_freqs"), [(BYTES, False), (PIECES, True)])
@pytest.mark.parametrize("read", [read_gguf_config, read_gguf_text])
def test_any_value_in_place_of_another_is_read_or_gets_a_sentence(
    read: Callable[[GgufFile], object], tokenizer: dict[str, Value], rope_freqs: bool, tmp_path: Path
) -> None:
    file = written(tmp_path / "model.gguf", tokenizer, rope_freqs)
    read(file)
    count = 0
    for key in file.metadata:
        for other in OTHERS:
            if sentence := sentence_of(read, replace(file, metadata={**file.metadata, key: other})):
                assert str(file.path) in sentence
                assert (
                    re.match(rf".*: (?!{re.escape(key)} )\S+ must be (an integer|a number|a text|true or)", sentence)
                    is None
                )
                count += 1
    assert count > 5 * len(OTHERS)
