"""`outrider verify` fails where it should: other weights, NaN, another recipe, another checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import outrider.compiler.__main__
import outrider.compiler.identity
import outrider.compiler.probes.choice
import outrider.tools.verify.__main__
import outrider.tools.verify.exactness
import outrider.tools.verify.oracle
from outrider.compiler.build import build
from outrider.compiler.models.decoder_keys import RopeKeys
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.probes.choice import ProbedOp
from outrider.compiler.recipe import load_recipe
from outrider.tools.parting import Parting
from outrider.tools.verify.partial_check import PartialCheck
from outrider.tools.verify.verification import LOGIT_BOUND, Verification
from tests.conftest import PARTIAL_KV, made_once
from tests.inexact import INEXACT_OPS, make_target_inexact
from tests.plans.damage import list_again

WEIGHTS = Path("engines") / "onnxruntime-cpu" / "weights.bin"

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def written(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of the toy with held-out text and one drafter, its checkpoints, and its plan."""

    def write(folder: Path) -> None:
        folder.mkdir()
        for checkpoint in ("target", "drafter"):
            shutil.copytree(toy_recipe.parent / checkpoint, folder / checkpoint)
        shutil.copyfile(toy_recipe.parent / "held_out.jsonl", folder / "held_out.jsonl")
        recipe = "held_out: held_out.jsonl\n" + toy_recipe.read_text(encoding="utf-8")
        drafters = re.compile(r"  - (?!{name: chain,).*\n")  # the others
        (folder / "model.yaml").write_text(drafters.sub("", recipe), encoding="utf-8")
        build(load_recipe(folder / "model.yaml"), folder / "model.yaml", folder / "plan")

    return made_once(tmp_path_factory, "verified", write)


@pytest.fixture
def workplace(written: Path, tmp_path: Path) -> Path:
    """A copy, to change."""
    return shutil.copytree(written, tmp_path / "work")


def run(*arguments: object) -> int:
    return outrider.compiler.__main__.main([str(a) for a in arguments])


def verify(workplace: Path, *options: object) -> int:
    arguments = (workplace / "plan", "--count", 2, "--new-tokens", 12, *options)
    return outrider.tools.verify.__main__.main([str(a) for a in arguments])


def put_weights(plan: Path, values: np.ndarray) -> None:
    """Other weights under a plan's own hashes: only running it can find them."""
    (plan / WEIGHTS).write_bytes(values.tobytes())
    list_again(plan)


def weights_of(plan: Path) -> np.ndarray:
    return np.fromfile(plan / WEIGHTS, np.float32)


@pytest.fixture
def plain_toy(toy_recipe: Path, tmp_path: Path) -> Path:
    """A recipe of the toy without drafters, to change its checkpoint or its scaling."""
    folder = tmp_path / "plain"
    shutil.copytree(toy_recipe.parent / "target", folder / "target")
    shutil.copyfile(toy_recipe.parent / "held_out.jsonl", folder / "held_out.jsonl")
    capacity = "{context: 160, prefill_chunk: 16}"
    (folder / "model.yaml").write_text(
        f"name: plain\nheld_out: held_out.jsonl\ntarget: {{checkpoint: target}}\ncapacity: {capacity}\n"
    )
    return folder


def change_config(folder: Path, own: dict[str, object]) -> None:
    path = folder / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | own), encoding="utf-8")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_a_key_of_the_checkpoint_that_the_build_misread_shows(
    plain_toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Our own decoder misreads it as the build did; transformers does not."""
    change_config(plain_toy, {"rope_parameters": YARN | {"rope_theta": 10000.0}})
    with monkeypatch.context() as misread:
        misread.setattr(RopeKeys, "_scaling_of", lambda *_: RopeScaling())
        assert run("build", plain_toy / "model.yaml", "--out", plain_toy / "plan") == 0
        assert verify(plain_toy, "--oracle", "decoder") == 0
    capsys.readouterr()
    assert verify(plain_toy, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["oracle"] == f"transformers {version('transformers')}"
    assert found["max_logit_error"] > LOGIT_BOUND


@pytest.mark.parametrize(
    ("own", "oracle", "said"),
    [
        ({}, "transformers", f"against transformers {version('transformers')}: 2 prompts, 24 tokens"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "decoder", "2 prompts, 24 tokens"),  # not read
    ],
)
def test_a_scaling_that_the_recipe_replaces_goes_to_the_oracle(
    own: dict[str, object], oracle: str, said: str, plain_toy: Path, capsys: Captured
) -> None:
    change_config(plain_toy, own)
    override = f"target.rope_scaling={json.dumps(YARN)}"
    assert run("build", plain_toy / "model.yaml", "--out", plain_toy / "plan", "--set", override) == 0
    capsys.readouterr()
    assert verify(plain_toy, "--oracle", oracle, "--set", override) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installed", "said"), [(None, "transformers is not installed"), ("4.57.1", "transformers 4.57.1 is older than 5")]
)
def test_without_transformers_our_own_decoder_serves_and_that_is_said(
    installed: str | None, said: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def installed_version(_: str) -> str:
        if installed is None:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr(outrider.tools.verify.oracle, "version", installed_version)
    assert verify(workplace) == 0
    assert f"against Outrider's own decoder in PyTorch {torch.__version__} ({said}" in capsys.readouterr().out
    assert verify(workplace, "--oracle", "transformers") == 2
    assert f"oracle transformers is asked for, and {said}" in capsys.readouterr().err


def test_a_checkpoint_that_transformers_cannot_load_is_said_with_the_way_out(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fail = Mock(side_effect=ValueError("an unknown key"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert verify(workplace) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be loaded by transformers" in said
    assert "(ValueError: an unknown key); --oracle decoder compares with our own decoder instead" in said


def test_other_weights_fail(workplace: Path, capsys: Captured) -> None:
    """Exchanged ones, a small error everywhere, though every token is the same, and none that are numbers."""
    plan = workplace / "plan"
    weights, rng = weights_of(plan), np.random.default_rng(0)

    def report(values: np.ndarray) -> dict[str, Any]:
        put_weights(plan, values.astype(np.float32))
        assert verify(workplace, "--json") == 1
        found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # JSON has no NaN
        assert found["passed"] is False
        return found

    assert LOGIT_BOUND < report(weights * 1.0005)["max_logit_error"] < 1
    assert report(np.full_like(weights, np.nan))["max_logit_error"] is None
    found = report(weights + rng.normal(0, 0.1, weights.shape))
    assert found["max_logit_error"] > 0.1
    assert found["tolerance"] == found["logit_bound"] == LOGIT_BOUND
    assert not all(d["near_tie"] for d in found["divergences"])
    assert verify(workplace) == 1
    assert "the plan does NOT agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "margin", "passed"),
    [
        (1e-5, 1.5e-5, True),
        (1e-5, 3e-5, False),  # closer than the bound, but no error explains it
        (9e-4, 9.5e-4, True),
        (9e-4, 1.5e-3, False),  # within twice the error, but not within the bound
        (2e-3, 0.0, False),
        (float("nan"), 0.0, False),
    ],
)
def test_the_verdict(error: float, margin: float, passed: bool) -> None:
    tolerance = min(LOGIT_BOUND, 2 * error)
    divergence = Parting(0, 9, 0, 1, 2, margin, near_tie=margin <= tolerance)
    result = Verification(max_logit_error=error, tolerance=tolerance, divergences=[divergence])
    assert result.passed is passed


def test_every_op_and_every_chunk_is_probed_on_this_machine(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """An op of which nothing is known is refused by name; a target whose logits depend on the chunk fails."""
    assert verify(workplace, "--json") == 0
    found = json.loads(capsys.readouterr().out)["exactness"]
    assert (found["passed"], found["inexact_ops"], found["inexact_chunks"]) == (True, [], [])
    assert found["ops"] > 5
    assert found["largest_chunk"] == 16
    make_target_inexact(workplace / "plan")
    assert verify(workplace) == 2
    assert "rows of DynamicQuantizeLinear depend on each other" in capsys.readouterr().err
    apart = outrider.compiler.probes.choice._APART
    monkeypatch.setitem(apart, "", {*apart[""], *INEXACT_OPS})
    assert verify(workplace, "--json") == 1
    found = json.loads(capsys.readouterr().out)["exactness"]
    assert (found["passed"], found["inexact_ops"]) == (False, [])
    assert len(found["inexact_chunks"]) > 5
    assert verify(workplace) == 1
    assert "target: DIFFERENT logits in chunks of " in capsys.readouterr().out


@pytest.mark.parametrize(("engine", "decides"), [("target", True), ("chain", False)])
def test_an_op_that_is_not_exact_fails_where_tokens_depend_on_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, engine: str, decides: bool
) -> None:
    across = ir.node("Softmax", [ir.Value(name="x")], {"axis": 1})
    op = ProbedOp(engine, across, 8, ("Softmax",), 0, "[8]")
    monkeypatch.setattr(
        outrider.tools.verify.exactness,
        "probed_ops",
        lambda engines: [*outrider.compiler.probes.choice.probed_ops(engines), op],
    )
    assert verify(workplace, "--json") == (1 if decides else 0)
    found = json.loads(capsys.readouterr().out)["exactness"]
    assert found["passed"] is not decides
    assert {(each["op"], each["decides"]) for each in found["inexact_ops"]} == {(f"{engine}: Softmax [8]", decides)}
    assert [each["threads"] for each in found["inexact_ops"]] == [0, 1, 2, 3]
    assert found["inexact_ops"][0]["rows"] == list(range(1, 32))
    verify(workplace)
    said = "DIFFERENT" if decides else "only drafts differ"
    assert f"{engine}: Softmax [8]: {said}, on 1 thread, in 1 to 31 rows" in capsys.readouterr().out


def test_overrides_of_the_build_are_asked_for_and_taken(workplace: Path, capsys: Captured) -> None:
    overrides = ("--set", "capacity.context=200", "--set", "drafters=[]")
    assert run("build", workplace / "model.yaml", "--out", workplace / "plan", *overrides) == 0
    capsys.readouterr()
    assert verify(workplace) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    said = printed.err.splitlines()[-1]
    assert "was built from another recipe: capacity.context is 200 in the plan and 160 in the recipe" in said
    assert "--set" in said
    assert verify(workplace, *overrides) == 0


def test_a_recipe_that_moved_and_a_checkpoint_that_was_trained_on_are_noticed(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """And a compiler that changed since the build is no reason to refuse."""
    (workplace / "model.yaml").rename(workplace / "moved.yaml")
    assert verify(workplace) == 2
    assert "model.yaml, which is not there any more; pass --recipe FILE" in capsys.readouterr().err
    monkeypatch.setattr(outrider.compiler.identity, "_source_digest", lambda: "another")
    assert verify(workplace, "--recipe", workplace / "moved.yaml") == 0
    path = workplace / "target" / "model.safetensors"
    tensors = {name: tensor + 1e-6 * torch.ones_like(tensor) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert verify(workplace, "--recipe", workplace / "moved.yaml") == 2
    assert "a checkpoint's files are others; build the plan again" in capsys.readouterr().err


def test_partial_kv_is_checked_after_long_contexts(workplace: Path, capsys: Captured) -> None:
    recipe = workplace / "model.yaml"
    recipe.write_text(f"partial_kv: {PARTIAL_KV}\n{recipe.read_text(encoding='utf-8')}", encoding="utf-8")
    shutil.rmtree(workplace / "plan")
    assert run("build", recipe, "--out", workplace / "plan") == 0
    capsys.readouterr()
    assert verify(workplace, "--json") == 0
    found = json.loads(capsys.readouterr().out)["partial_kv"]
    assert found["context"] == 2 * 30
    assert found["runs"] == found["lossless_equal_runs"] == 2
    assert found["partial_rounds"] > 0
    assert 0 <= found["same"] <= 1
    assert 0 <= found["agreement"] <= 1
    assert verify(workplace) == 0
    assert "lossless 2 of 2 runs with the tokens of full KV; lossy drifts: " in capsys.readouterr().out
    assert not Verification(partial_kv=PartialCheck(100, runs=3, lossless_equal_runs=2)).passed
