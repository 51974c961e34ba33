"""A manifest that contradicts itself or its files is refused, and the sentence names the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plans.damage import BACKEND, Edit, edit, refused

# plan.json as data. Every case names what the sentence must name.


def backend(m: dict[str, Any]) -> dict[str, Any]:
    return m["backends"][BACKEND]


def model(m: dict[str, Any]) -> dict[str, Any]:
    return m["models"]["target"]


def symbols(m: dict[str, Any]) -> dict[str, Any]:
    return backend(m)["symbols"]["target"]


def stage(m: dict[str, Any], program: str, index: int) -> dict[str, Any]:
    return backend(m)["programs"][program]["stages"][index]


def tensor(m: dict[str, Any], name: str) -> dict[str, Any]:
    return next(b for b in backend(m)["buffers"] if b["name"] == f"target.{name}")


def engine(m: dict[str, Any]) -> dict[str, Any]:
    return backend(m)["engines"]["target"]


def rename_buffer(m: dict[str, Any], old: str, new: str) -> None:
    tensor(m, old)["name"] = new


MASK, FORWARD, SAMPLE = 0, 1, 2  # places in `decode`

WRONG: dict[str, tuple[Edit, str]] = {
    "an extra key": (lambda m: m.update(hook="import os"), "hook"),
    "an extra key deep inside": (lambda m: model(m).update(color=1), "models.target.color"),
    "a missing key": (lambda m: m.pop("drafters"), "drafters"),
    "a number as text": (lambda m: model(m).update(layers="2"), "models.target.layers"),
    "a number as a fraction": (lambda m: model(m).update(layers=2.0), "models.target.layers"),
    "a number as a truth": (lambda m: model(m).update(branches=True), "models.target.branches"),
    "null for a table": (lambda m: m.update(backends=None), "backends"),
    "a list for a table": (lambda m: m.update(backends=[]), "backends"),
    "no backend": (lambda m: m.update(backends={}), "holds"),
    "an unknown backend": (lambda m: m.update(backends={"cuda": backend(m)}), "cuda"),
    "a hash of the wrong length": (lambda m: m["files"][0].update(sha256="00"), "sha256"),
    "an identity that is no hash": (lambda m: m.update(identity="x"), "identity"),
    "a negative size of a file": (lambda m: m["files"][0].update(size=-1), "size"),
    "a size of a file with 4000 digits": (lambda m: m["files"][0].update(size=10**3999), "size"),
    "negative layers": (lambda m: model(m).update(layers=-1), "models.target.layers"),
    "no layers": (lambda m: model(m).update(layers=0), "models.target.layers"),
    "layers with 4000 digits": (lambda m: model(m).update(layers=10**3999), "models.target.layers"),
    "another number of layers": (lambda m: model(m).update(layers=2), "kv"),
    "heads that do not divide": (lambda m: model(m).update(heads=3), "heads"),
    "another vocabulary": (lambda m: model(m).update(vocab_size=299), "logits"),
    "another capacity": (lambda m: model(m).update(capacity=2**20), "kv"),
    "a context beyond the KV cache": (lambda m: model(m).update(context=1000), "context"),
    "a chunk beyond the buffers": (
        lambda m: [g.update(prefill_chunk=17) for g in m["models"].values()], "symbols.target.N",
    ),
    "a drafter with another chunk": (lambda m: m["models"]["chain"].update(prefill_chunk=8), "models.chain"),
    "a model that nobody is": (lambda m: m["models"].update(other=model(m)), "models"),
    "a drafter without its model": (lambda m: m["models"].pop("head"), "models"),
    "a tree with more nodes than it grows": (lambda m: m["drafters"][2]["tree"].update(nodes=7), "chain.tree"),
    "a head without features": (lambda m: model(m).update(feature_size=0), "features"),
    "a tree without a program to keep its rows": (
        lambda m: backend(m)["programs"].pop("compact.bushy"), "compact.bushy",
    ),
    "a program to keep rows that runs an engine": (
        lambda m: backend(m)["programs"]["compact.bushy"]["stages"].append(stage(m, "extend.bushy", 1)),
        "compact.bushy",
    ),
    "a program to keep rows that does nothing": (
        lambda m: backend(m)["programs"]["compact.bushy"].update(stages=[]), "compact.bushy",
    ),
    "a drafter without a program to extend it": (lambda m: backend(m)["programs"].pop("extend.head"), "extend.head"),
    "more branches than slots": (lambda m: model(m).update(branches=2), "target.accepted_count"),
    "two drafters of one name": (lambda m: m["drafters"][1].update(name="ngram"), "ngram"),
    "no such drafter after n-grams": (lambda m: m["drafters"][0].update(otherwise="oracle"), "'oracle' is no drafter"),
    "a drafter named none": (lambda m: m["drafters"][1].update(name="none"), "none"),
    "a drafter of unknown kind": (lambda m: m["drafters"][0].update(kind="oracle"), "kind"),
    "a draft longer than its buffers": (lambda m: m["drafters"][0].update(max_draft=2**24), "draft"),
    "a draft of absurd length": (lambda m: m["drafters"][0].update(max_draft=10**15), "max_draft"),
    "a drafter with contexts in the wrong order": (lambda m: m["drafters"][0].update(min_context=9), "min_context"),
    "a memory that holds no text": (lambda m: m["drafters"][0].update(memory=1023), "memory is 1023 tokens, neither 0"),
    "a memory of absurd size": (lambda m: m["drafters"][0].update(memory=2**24 + 1), "to 16777216"),
    "a memory of less than nothing": (lambda m: m["drafters"][0].update(memory=-1), "memory"),
    "a drafter without a program": (lambda m: backend(m)["programs"].pop("speculate.chain"), "speculate.chain"),
    "no decode program": (lambda m: backend(m)["programs"].pop("decode"), "decode"),
    "no beam program": (lambda m: backend(m)["programs"].pop("beam"), "beam"),
    "a beam program that masks": (
        lambda m: backend(m)["programs"]["beam"]["stages"].insert(0, stage(m, "decode", MASK)), "programs.beam",
    ),
    "a beam program with results": (
        lambda m: backend(m)["programs"]["beam"].update(results={"tokens": "target.committed"}), "programs.beam",
    ),
    "no prefill program": (lambda m: backend(m)["programs"].pop("prefill"), "prefill"),
    "an unknown symbol in a buffer": (lambda m: tensor(m, "token_ids").update(shape=["Q"]), "token_ids"),
    "a symbol that is no letter": (lambda m: tensor(m, "token_ids").update(shape=["NN"]), "buffers"),
    "a symbol without a size": (lambda m: symbols(m).pop("M"), "symbols"),
    "a symbol too many": (lambda m: symbols(m).update(Q=1), "symbols"),
    "a symbol of size 0": (lambda m: symbols(m).update(M=0), "symbols.target.M"),
    "a negative symbol": (lambda m: symbols(m).update(N=-5), "symbols.target.N"),
    "a view beyond the KV cache": (lambda m: symbols(m).update(T=2**23), "symbols.target.T"),
    "steps of absurd length": (lambda m: symbols(m).update(N=2**24), "symbols.target.N"),
    "trees of absurd size": (lambda m: symbols(m).update(N=2**24, M=2**23), "symbols.target.M"),
    "a buffer of terabytes": (
        lambda m: backend(m)["buffers"].append({"name": "x", "dtype": "float64", "shape": [2**24, 2**24]}), "bytes",
    ),
    "a buffer of more bytes than 64 bits count": (
        lambda m: backend(m)["buffers"].append({"name": "x", "dtype": "float64", "shape": [2**24] * 40}), "bytes",
    ),
    "a negative dimension": (lambda m: tensor(m, "kv").update(shape=[4, 1, 2, -384, 16]), "buffers"),
    "a dimension of 0": (lambda m: tensor(m, "kv").update(shape=[4, 1, 2, 0, 16]), "buffers"),
    "a buffer with another dtype": (lambda m: tensor(m, "positions").update(dtype="int32"), "positions"),
    "a buffer with an unknown dtype": (lambda m: tensor(m, "positions").update(dtype="object"), "dtype"),
    "a buffer that is too small": (lambda m: tensor(m, "kept_indices").update(shape=["M"]), "kept_indices"),
    "a KV cache of whole numbers": (lambda m: tensor(m, "kv").update(dtype="int64"), "k_cache.0"),
    "a KV cache of half precision": (lambda m: tensor(m, "kv").update(dtype="float16"), "k_cache.0"),
    "a KV cache of int8 without scales": (lambda m: tensor(m, "kv").update(dtype="int8"), "target.kv' must be int8"),
    "a missing buffer": (lambda m: rename_buffer(m, "logits", "target.other"), "logits"),
    "a buffer twice": (lambda m: backend(m)["buffers"].append(tensor(m, "bim")), "twice"),
    "a view of an unknown buffer": (lambda m: backend(m)["views"]["target.k_cache.0"].update(buffer="x"), "k_cache.0"),
    "a view beyond its buffer": (lambda m: backend(m)["views"]["target.k_cache.0"].update(plane=8), "k_cache.0"),
    "a view before its buffer": (lambda m: backend(m)["views"]["target.k_cache.0"].update(plane=-1), "plane"),
    "a view with a buffer's name": (
        lambda m: backend(m)["views"].update({"target.bim": {"buffer": "target.kv", "plane": 0}}), "bim",
    ),
    "a missing view": (lambda m: backend(m)["views"].pop("target.v_cache.1"), "v_cache.1"),
    "an unknown buffer in a stage": (lambda m: stage(m, "decode", MASK)["inputs"].update(bim="nowhere"), "nowhere"),
    "an unknown op": (lambda m: stage(m, "decode", MASK).update(run="os.system"), "os.system"),
    "an op that stands in graphs only": (lambda m: stage(m, "decode", MASK).update(run="BranchAttention"), "Branch"),
    "an unknown engine": (lambda m: stage(m, "decode", FORWARD).update(run="draft"), "draft"),
    "an unknown drafter": (lambda m: stage(m, "speculate.chain", 2).update(run="oracle"), "oracle"),
    "an unknown kind of stage": (lambda m: stage(m, "decode", 0).update(kind="python"), "kind"),
    "an op without an input": (lambda m: stage(m, "decode", MASK)["inputs"].pop("bim"), "bim"),
    "an op with a tensor too many": (lambda m: stage(m, "decode", MASK)["inputs"].update(x="target.bim"), "x"),
    "an op on a buffer of another dtype": (
        lambda m: stage(m, "decode", SAMPLE)["inputs"].update(temperature="top_k"), "temperature",
    ),
    "an op on a buffer of another shape": (
        lambda m: stage(m, "decode", MASK)["inputs"].update(branch="target.logit_indices"), "BimMask",
    ),
    "an op with an unknown attribute": (lambda m: stage(m, "decode", SAMPLE).update(attributes={"x": 1}), "x"),
    "an attribute out of range": (
        lambda m: stage(m, "decode", SAMPLE).update(attributes={"purpose": 10**30}), "Sample",
    ),
    "an attribute that is a fraction": (
        lambda m: stage(m, "decode", SAMPLE).update(attributes={"purpose": 0.5}), "Sample",
    ),
    "an attribute with a tensor's name": (
        lambda m: stage(m, "decode", SAMPLE).update(attributes={"seed": 1}), "Sample",
    ),
    "a parameter bound twice": (
        lambda m: stage(m, "verify", 3).update(outputs={"source": "target.kv"}), "source",
    ),
    "an engine without an input": (lambda m: stage(m, "decode", FORWARD)["inputs"].pop("token_ids"), "bind"),
    "an engine on a buffer of another shape": (
        lambda m: stage(m, "decode", FORWARD)["inputs"].update(token_ids="target.logit_indices"), "token_ids",
    ),
    "an engine on a buffer of another dtype": (
        lambda m: stage(m, "decode", FORWARD)["inputs"].update({"k_cache.0": "target.kv"}), "k_cache.0",
    ),
    "an alias broken in a stage": (
        lambda m: stage(m, "decode", FORWARD)["outputs"].update({"k_cache.0_out": "target.k_cache.1"}), "k_cache.0",
    ),
    "an alias of nothing": (lambda m: engine(m)["aliases"].update(logits="nothing"), "logits"),
    "an engine tensor the graph lacks": (
        lambda m: (engine(m)["inputs"].append({"name": "bim", "dtype": "int64", "shape": [1, 384]}),
                   [p["stages"][i]["inputs"].update(bim="target.bim")
                    for p in backend(m)["programs"].values()
                    for i, s in enumerate(p["stages"]) if s["run"] == "target"]), "target.onnx",
    ),
    "an engine tensor with another symbol": (
        lambda m: next(t for t in engine(m)["inputs"] if t["name"] == "token_ids").update(shape=["M"]), "token_ids",
    ),
    "an engine input twice": (lambda m: engine(m)["inputs"].append(engine(m)["inputs"][0]), "same name"),
    "an engine of an unknown symbol": (
        lambda m: next(t for t in engine(m)["inputs"] if t["name"] == "token_ids").update(shape=["Q"]), "token_ids",
    ),
    "results nowhere": (lambda m: backend(m)["programs"]["decode"]["results"].update(tokens="x"), "results"),
    "results that no stage writes": (
        lambda m: backend(m)["programs"]["decode"]["results"].update(tokens="target.bim"), "results",
    ),
    "no results": (lambda m: backend(m)["programs"]["decode"].update(results=None), "results"),
    "counts where nothing is counted": (
        lambda m: backend(m)["programs"]["decode"]["results"].update(counts="target.accepted_count"), "counts",
    ),
    "no counts where trees are": (
        lambda m: backend(m)["programs"]["verify"]["results"].update(counts=None), "counts",
    ),
    "counts of another kind": (
        lambda m: backend(m)["programs"]["verify"]["results"].update(counts="target.kept_count"), "results",
    ),
    "a stage that writes what the host owns": (
        lambda m: stage(m, "verify", 2)["outputs"].update(kept_count="target.past_length"), "past_length",
    ),
    "a program without an engine": (lambda m: backend(m)["programs"]["prefill"].update(stages=[]), "prefill"),
    "a stage for an unknown model": (lambda m: stage(m, "decode", MASK).update(model="draft"), "draft"),
    "no target model": (lambda m: m["models"].clear(), "target"),
    "a model without buffers": (lambda m: m["models"].update(draft=model(m)), "models"),
    "buckets of no model": (
        lambda m: backend(m).update(buckets={"other": {"new": [1], "view": [256]}}), "buckets.other.new: the plan",
    ),
    "buckets that do not ascend": (
        lambda m: backend(m).update(buckets={"target": {"new": [2, 1], "view": [256]}}), "buckets.target.new: 2, 1",
    ),
    "buckets that are too large": (
        lambda m: backend(m).update(buckets={"target": {"new": [1, 4000], "view": [256]}}), "at most 2",
    ),
    "buckets without the largest view": (
        lambda m: backend(m).update(buckets={"target": {"new": [1], "view": [128]}}), "the largest view, 256",
    ),
    "more rows than one": (lambda m: symbols(m).update(R=2), "rows"),
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
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", full)
    assert "capacity.context" in refused(plan)
