"""A manifest that contradicts itself or its files is refused, and the sentence names the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.plans.damage import BACKEND, Edit, edit, refused

# plan.json as data. Every case names what the sentence must name.

Data = dict[str, Any]
MASK, FORWARD, SAMPLE = 0, 1, 2  # places in `decode`


def backend(m: Data) -> Data:
    return m["backends"][BACKEND]


def model(m: Data) -> Data:
    return m["models"]["target"]


def symbols(m: Data) -> Data:
    return backend(m)["symbols"]["target"]


def views(m: Data) -> Data:
    return backend(m)["views"]


def program(m: Data, name: str) -> Data:
    return backend(m)["programs"][name]


def without(name: str) -> tuple[Edit, str]:
    """A plan without a program."""
    return lambda m: backend(m)["programs"].pop(name), name


def stage(m: Data, name: str, index: int) -> Data:
    return program(m, name)["stages"][index]


def inputs(m: Data, index: int) -> Data:
    return stage(m, "decode", index)["inputs"]


def tensor(m: Data, name: str) -> Data:
    return next(b for b in backend(m)["buffers"] if b["name"] == f"target.{name}")


def engine(m: Data) -> Data:
    return backend(m)["engines"]["target"]


def token_ids(m: Data) -> Data:
    return next(t for t in engine(m)["inputs"] if t["name"] == "token_ids")


def ngram(**settings: Any) -> Edit:
    return lambda m: m["drafters"][0].update(settings)


def buckets(new: list[int], view: int, of: str = "target") -> Edit:
    return lambda m: backend(m).update(buckets={of: {"new": new, "view": [view]}})


def results(name: str, **buffers: str | None) -> Edit:
    return lambda m: program(m, name)["results"].update(buffers)


def read_more(m: Data) -> None:
    """The engine and its stages agree on an input that the graph lacks."""
    engine(m)["inputs"].append({"name": "bim", "dtype": "int64", "shape": [1, 384]})
    for each in backend(m)["programs"].values():
        for found in each["stages"]:
            if found["run"] == "target":
                found["inputs"]["bim"] = "target.bim"


WRONG: dict[str, tuple[Edit, str]] = {
    # What Pydantic finds.
    "an extra key": (lambda m: m.update(hook="import os"), "hook"),
    "a missing key": (lambda m: m.pop("drafters"), "drafters"),
    "a number as text": (lambda m: model(m).update(layers="2"), "models.target.layers"),
    "a number as a truth": (lambda m: model(m).update(branches=True), "models.target.branches"),
    "layers with 4000 digits": (lambda m: model(m).update(layers=10**3999), "models.target.layers"),
    "a symbol of size 0": (lambda m: symbols(m).update(M=0), "symbols.target.M"),
    "a dimension of 0": (lambda m: tensor(m, "kv").update(shape=[4, 1, 2, 0, 16]), "buffers"),
    # Backends, models and drafters.
    "no backend": (lambda m: m.update(backends={}), "holds"),
    "an unknown backend": (lambda m: m.update(backends={"cuda": backend(m)}), "cuda"),
    "no target model": (lambda m: m["models"].clear(), "target"),
    "a model that nobody is": (lambda m: m["models"].update(other=model(m)), "models"),
    "a drafter without its model": (lambda m: m["models"].pop("head"), "models"),
    "another number of layers": (lambda m: model(m).update(layers=2), "kv"),
    "heads that do not divide": (lambda m: model(m).update(heads=3), "heads"),
    "another vocabulary": (lambda m: model(m).update(vocab_size=299), "logits"),
    "a context beyond the KV cache": (lambda m: model(m).update(context=1000), "context"),
    "a chunk beyond the buffers": (lambda m: [g.update(prefill_chunk=17) for g in m["models"].values()], "target.N"),
    "a drafter with another chunk": (lambda m: m["models"]["chain"].update(prefill_chunk=8), "models.chain"),
    "a tree with more nodes than it grows": (lambda m: m["drafters"][2]["tree"].update(nodes=7), "chain.tree"),
    "a head without features": (lambda m: model(m).update(feature_size=0), "features"),
    "more branches than slots": (lambda m: model(m).update(branches=2), "target.accepted_count"),
    "two drafters of one name": (lambda m: m["drafters"][1].update(name="ngram"), "ngram"),
    "a drafter named none": (lambda m: m["drafters"][1].update(name="none"), "none"),
    "no such drafter after n-grams": (ngram(otherwise="oracle"), "'oracle' is no drafter"),
    "a draft longer than its buffers": (ngram(max_draft=64), "draft"),
    "a drafter with contexts in the wrong order": (ngram(min_context=9), "min_context"),
    "a memory that holds no text": (ngram(memory=1023), "is 1023; raise it to at least 1024"),
    "a memory of absurd size": (ngram(memory=2**24 + 1), "16777216"),
    # Programs.
    "no decode program": without("decode"),
    "no beam program": without("beam"),
    "a drafter without a program": without("speculate.chain"),
    "a drafter without a program to extend it": without("extend.head"),
    "a tree without a program to keep its rows": without("compact.bushy"),
    "a program to keep rows that runs an engine": (
        lambda m: program(m, "compact.bushy")["stages"].append(stage(m, "extend.bushy", 1)), "compact.bushy",
    ),
    "a program that keeps no rows": (lambda m: program(m, "compact.bushy").update(stages=[]), "compact.bushy"),
    "a beam program that masks": (
        lambda m: program(m, "beam")["stages"].insert(0, stage(m, "decode", MASK)), "programs.beam",
    ),
    "a beam program with results": (
        lambda m: program(m, "beam").update(results={"tokens": "target.committed"}), "programs.beam",
    ),
    "a program without an engine": (lambda m: program(m, "prefill").update(stages=[]), "prefill"),
    "results of another kind": (results("decode", tokens="target.bim"), "results"),
    "results that no stage writes": (lambda m: program(m, "decode")["stages"].pop(), "written by a stage"),
    "no results": (lambda m: program(m, "decode").update(results=None), "results"),
    "counts where nothing is counted": (results("decode", counts="target.accepted_count"), "counts"),
    "no counts where trees are": (results("verify", counts=None), "counts"),
    "counts of another kind": (results("verify", counts="target.kept_count"), "results"),
    # Symbols and buckets.
    "a symbol without a size": (lambda m: symbols(m).pop("M"), "symbols"),
    "a symbol too many": (lambda m: symbols(m).update(Q=1), "symbols"),
    "a view beyond the KV cache": (lambda m: symbols(m).update(T=2**23), "symbols.target.T"),
    "steps of absurd length": (lambda m: symbols(m).update(N=2**24), "symbols.target.N"),
    "trees of absurd size": (lambda m: symbols(m).update(N=2**24, M=2**23), "symbols.target.M"),
    "more rows than one": (lambda m: symbols(m).update(R=2), "rows"),
    "buckets of no model": (buckets([1], 256, of="other"), "buckets.other.new: the plan"),
    "buckets that do not ascend": (buckets([2, 1], 256), "buckets.target.new: 2, 1"),
    "buckets that are too large": (buckets([1, 4000], 256), "at most 2"),
    "buckets without the largest view": (buckets([1], 128), "the largest view, 256"),
    # Buffers and views.
    "an unknown symbol in a buffer": (lambda m: tensor(m, "token_ids").update(shape=["Q"]), "token_ids"),
    "a buffer of more bytes than 64 bits count": (
        lambda m: backend(m)["buffers"].append({"name": "x", "dtype": "float64", "shape": [2**24] * 40}), "bytes",
    ),
    "a buffer with another dtype": (lambda m: tensor(m, "positions").update(dtype="int32"), "positions"),
    "a buffer that is too small": (lambda m: tensor(m, "kept_indices").update(shape=["M"]), "kept_indices"),
    "a KV cache of whole numbers": (lambda m: tensor(m, "kv").update(dtype="int64"), "k_cache.0"),
    "a KV cache of int8 without scales": (lambda m: tensor(m, "kv").update(dtype="int8"), "target.kv' must be int8"),
    "a missing buffer": (lambda m: tensor(m, "logits").update(name="target.other"), "logits"),
    "a buffer twice": (lambda m: backend(m)["buffers"].append(tensor(m, "bim")), "twice"),
    "a view of an unknown buffer": (lambda m: views(m)["target.k_cache.0"].update(buffer="x"), "k_cache.0"),
    "a view beyond its buffer": (lambda m: views(m)["target.k_cache.0"].update(plane=8), "k_cache.0"),
    "a view named as a buffer": (lambda m: views(m).update({"target.bim": {"buffer": "target.kv", "plane": 0}}), "bim"),
    "a missing view": (lambda m: views(m).pop("target.v_cache.1"), "v_cache.1"),
    # Stages.
    "a stage for an unknown model": (lambda m: stage(m, "decode", MASK).update(model="draft"), "draft"),
    "an unknown buffer in a stage": (lambda m: inputs(m, MASK).update(bim="nowhere"), "nowhere"),
    "a parameter bound twice": (lambda m: stage(m, "verify", 3).update(outputs={"source": "target.kv"}), "two buffers"),
    "a stage that writes what the host owns": (
        lambda m: stage(m, "verify", 2)["outputs"].update(kept_count="target.past_length"), "past_length",
    ),
    "an unknown op": (lambda m: stage(m, "decode", MASK).update(run="os.system"), "os.system"),
    "an op that stands in graphs only": (lambda m: stage(m, "decode", MASK).update(run="BranchAttention"), "Branch"),
    "an op without an input": (lambda m: inputs(m, MASK).pop("bim"), "bim"),
    "an op with a tensor too many": (lambda m: inputs(m, MASK).update(x="target.bim"), "x"),
    "an op on a buffer of another dtype": (lambda m: inputs(m, SAMPLE).update(temperature="top_k"), "temperature"),
    "an op on a buffer of another shape": (lambda m: inputs(m, MASK).update(branch="target.logit_indices"), "BimMask"),
    "an op with an unknown attribute": (lambda m: stage(m, "decode", SAMPLE).update(attributes={"x": 1}), "x"),
    # Engines.
    "an unknown engine": (lambda m: stage(m, "decode", FORWARD).update(run="draft"), "draft"),
    "an unknown drafter": (lambda m: stage(m, "speculate.chain", 2).update(run="oracle"), "oracle"),
    "an engine without an input": (lambda m: inputs(m, FORWARD).pop("token_ids"), "bind"),
    "an engine on a buffer of another shape": (
        lambda m: inputs(m, FORWARD).update(token_ids="target.logit_indices"), "token_ids",
    ),
    "an engine on a buffer of another dtype": (
        lambda m: inputs(m, FORWARD).update({"k_cache.0": "target.kv"}), "k_cache.0",
    ),
    "an alias broken in a stage": (
        lambda m: stage(m, "decode", FORWARD)["outputs"].update({"k_cache.0_out": "target.k_cache.1"}), "k_cache.0",
    ),
    "an alias of nothing": (lambda m: engine(m)["aliases"].update(logits="nothing"), "logits"),
    "an engine tensor the graph lacks": (read_more, "target.onnx"),
    "an engine tensor with another symbol": (lambda m: token_ids(m).update(shape=["M"]), "token_ids"),
    "an engine of an unknown symbol": (lambda m: token_ids(m).update(shape=["Q"]), "token_ids"),
    "an engine input twice": (lambda m: engine(m)["inputs"].append(engine(m)["inputs"][0]), "same name"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_that_is_wrong_is_refused_and_the_place_is_named(plan: Path, case: str) -> None:
    change, named = WRONG[case]
    edit(plan, change)
    sentence = refused(plan)
    assert named in sentence
    assert len(sentence) < 1500


def test_geometry_and_buffers_that_agree_with_each_other_must_agree_with_the_graph(plan: Path) -> None:
    """A consistent lie about the KV cache: nothing is allocated by its word."""

    def lie(m: dict[str, Any]) -> None:
        model(m)["capacity"] = 2**24
        tensor(m, "bim")["shape"][1] = tensor(m, "slot_positions")["shape"][1] = 2**24
        tensor(m, "kv")["shape"][3] = 2**24
        for t in (*engine(m)["inputs"], *engine(m)["outputs"]):
            if "cache" in t["name"]:
                t["shape"][2] = 2**24

    edit(plan, lie)
    assert "target.onnx" in refused(plan)


def test_a_session_that_memory_cannot_hold_is_a_sentence(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "zeros", Mock(side_effect=MemoryError))
    assert "capacity.context" in refused(plan)
