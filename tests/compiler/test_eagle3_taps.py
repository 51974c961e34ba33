"""Which of the target's layers an EAGLE3 head reads: named by its checkpoint, by the recipe, or by default."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.compiler.inspect import describe, print_description
from outrider.compiler.models.eagle3_config import Eagle3Overrides

from .eagle3_heads import (
    LAYOUTS,
    Layout,
    change_config,
    read_eagle3_config,
    refused,
    target_config,
    write_eagle3,
)


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (36, (2, 18, 33))])
def test_default_taps_of_a_target(layers: int, taps: tuple[int, ...], tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    assert read_eagle3_config(tmp_path, target_config(layers=layers)).aux_layers == taps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_of_layers_whose_output_is_read_are_one_lower(layout: Layout, tmp_path: Path) -> None:
    """What SpecForge names by default for 94 layers, [1, 46, 90], is ours, [2, 47, 91]."""
    target = target_config(layers=94)
    write_eagle3(tmp_path, layout=layout)
    default = read_eagle3_config(tmp_path, target).aux_layers
    write_eagle3(tmp_path, layout=layout, aux_layer_ids=[1, 46, 90])
    assert read_eagle3_config(tmp_path, target).aux_layers == default == (2, 47, 91)


BY_FIRST, LEFT = "eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids"


@pytest.mark.parametrize(
    ("keys", "taps", "reason"),
    [
        # As vLLM, speculators and TorchSpec write them.
        ({BY_FIRST: [2, 4, 5]}, (2, 4, 5), f"{BY_FIRST} [2, 4, 5], first id not 1: indices of hidden_states"),
        ({"eagle_config": {BY_FIRST: [5, 1, 2]}}, (5, 1, 2), "first id not 1: indices of hidden_states"),
        ({BY_FIRST: [1, 3, 5]}, (2, 4, 6), "first id 1: layers whose output is read"),
        ({LEFT: [2, 0, 1]}, (3, 1, 2), f"{LEFT} [2, 0, 1], layers whose output is read"),
        ({"eagle_config": {LEFT: [2, 4, 5]}}, (3, 5, 6), f"eagle_config.{LEFT} [2, 4, 5], layers whose"),
        ({LEFT: [1, 3, 4], BY_FIRST: [2, 4, 5]}, (2, 4, 5), BY_FIRST),  # AngelSlim writes both
    ],
)
def test_the_key_and_the_first_id_say_how_layers_are_counted(
    keys: dict[str, Any], taps: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    write_eagle3(tmp_path)
    change_config(tmp_path, **keys)
    found = read_eagle3_config(tmp_path, target_config(layers=8)).taps
    assert found.layers == taps
    assert reason in found.reason


@pytest.mark.parametrize("nested", [False, True])
def test_a_key_that_only_seems_to_name_taps_is_refused(nested: bool, tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_states_layer_ids"):
        change_config(tmp_path, **({"eagle_config": {key: [1, 3, 4]}} if nested else {key: [1, 3, 4]}))
        refused(tmp_path, f"{key} is read by no project that is known here", "set aux_layers in the recipe")
        given = Eagle3Overrides(aux_layers=(1, 4, 6))
        taps = read_eagle3_config(tmp_path, target_config(), given).taps
        assert taps == ((1, 4, 6), "aux_layers of the recipe")
        change_config(tmp_path, **{key: None}, eagle_config=None)


def test_the_reason_is_in_the_plan_and_shown(tmp_path: Path, toy_plan: Path, reference_plan: Path) -> None:
    shown = [describe(plan) for plan in (toy_plan, reference_plan)]
    taps = [next(d["taps"] for d in each["drafters"] if d["kind"] == "eagle3") for each in shown]
    assert (taps[0]["layers"], taps[1]["layers"]) == ((0, 1, 2), (2, 4, 5))
    console = Console(file=StringIO(), width=400)
    print_description(shown[1], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2, 4, 5: eagle_config.eagle_aux_hidden_state_layer_ids [1, 3, 4], first id 1: layers whose" in printed


def test_target_with_too_few_layers_for_three_taps(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    few = "the target has 6 layers, but three distinct default taps need 7"
    refused(tmp_path, few, "the recipe's aux_layers", target=target_config(layers=6))


@pytest.mark.parametrize("ids", [[0, 1], [0, 1, 1], [-1, 2, 3], [1, 3, 7], [1, 3, "5"], 3])
@pytest.mark.parametrize("layout", ["specforge", "angelslim"])
def test_wrong_taps(ids: list[int], layout: Layout, tmp_path: Path) -> None:
    write_eagle3(tmp_path, layout=layout, aux_layer_ids=ids)
    refused(tmp_path, "config.json: ", "layer_ids", "must be ", ", found ")


def test_taps_that_contradict_each_other(tmp_path: Path) -> None:
    write_eagle3(tmp_path, layout="specforge", aux_layer_ids=[1, 2, 3])
    change_config(tmp_path, aux_hidden_states_layer_ids=[1, 2, 4])
    refused(
        tmp_path,
        "layer_ids [1, 2, 3], first id 1",
        "([2, 3, 4]); and aux_hidden_states_layer_ids [1, 2, 4], layers",
        "([2, 3, 5])",
        "set aux_layers in the recipe",
    )
    change_config(tmp_path, aux_hidden_states_layer_ids=None, eagle_aux_hidden_state_layer_ids=[2, 3, 5])
    refused(tmp_path, "eagle_aux_hidden_state_layer_ids [2, 3, 5], first id not 1")
