"""Which of the target's layers an EAGLE3 head reads: named by its checkpoint, by the recipe, or by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.eagle3_checkpoint import load_eagle3, read_eagle3_config

from .eagle3_heads import (
    LAYOUTS,
    Layout,
    change_config,
    refused,
    target_config,
    write_eagle3,
)


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (36, (2, 18, 33))])
def test_default_taps_of_a_target(layers: int, taps: tuple[int, ...], tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    assert read_eagle3_config(tmp_path, target_config(layers=layers)).aux_layers == taps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_named_taps_are_the_streams_behind_those_layers(layout: Layout, tmp_path: Path) -> None:
    """What SpecForge names by default for 94 layers, [1, 46, 90], is the default of FEATURES, [2, 47, 91]."""
    target = target_config(layers=94)
    write_eagle3(tmp_path, layout=layout)
    default = read_eagle3_config(tmp_path, target).aux_layers
    write_eagle3(tmp_path, layout=layout, aux_layer_ids=[1, 46, 90])
    assert read_eagle3_config(tmp_path, target).aux_layers == default == (2, 47, 91)
    write_eagle3(tmp_path, layout=layout, aux_layer_ids=[2, 0, 1])
    assert read_eagle3_config(tmp_path, target_config(layers=4)).aux_layers == (3, 1, 2)


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_target_with_too_few_layers_for_three_taps(layers: int, tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    refused(
        tmp_path,
        f"the target has {layers} layers, but three distinct default taps need 7",
        "the recipe's aux_layers",
        target=target_config(layers=layers),
    )


@pytest.mark.parametrize("ids", [[0, 1], [0, 1, 1], [-1, 2, 3], [1, 3, 7], [1, 3, "5"], [1, 3, 5.0], 3, [True, 2, 3]])
@pytest.mark.parametrize("layout", ["specforge", "angelslim"])
def test_wrong_taps(ids: list[int], layout: Layout, tmp_path: Path) -> None:
    write_eagle3(tmp_path, layout=layout, aux_layer_ids=ids)
    refused(tmp_path, "layer_ids must be 3 different layers from 0 to 6 of the target", f"found {ids!r}")


def test_taps_at_the_top_under_the_nested_name(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    change_config(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    assert read_eagle3_config(tmp_path, target_config()).aux_layers == (2, 4, 6)


def test_taps_that_contradict_each_other(tmp_path: Path) -> None:
    write_eagle3(tmp_path, layout="specforge", aux_layer_ids=[1, 2, 3])
    change_config(tmp_path, aux_hidden_states_layer_ids=[1, 2, 4])
    refused(tmp_path, "is [1, 2, 3] and aux_hidden_states_layer_ids is [1, 2, 4]", "aux_layers")


def test_given_taps_win(tmp_path: Path) -> None:
    write_eagle3(tmp_path, aux_layer_ids=[1, 2, 3])
    assert read_eagle3_config(tmp_path, target_config(), aux_layers=(1, 4, 6)).aux_layers == (1, 4, 6)
    assert load_eagle3(tmp_path, target_config(), aux_layers=(1, 4, 6)).config.aux_layers == (1, 4, 6)
