"""Decoders of a recipe whose quantised weights are searched on text."""

from __future__ import annotations

from outrider.compiler.held_out import read_prompts
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.quantization.calibration import CalibratedTensors, Progress, calibrate
from outrider.compiler.recipe import Recipe
from outrider.compiler.recipe_sections import WeightsSection
from outrider.compiler.text import CheckpointText
from outrider.plans.errors import RecipeError

_LONGEST = 2048
"""Tokens of a sequence; longer texts are cut in pieces, so that attention stays cheap."""
_LEAST = 64
"""Tokens that make a text: with fewer, what a weight does to it is chance."""


def calibrate_by_recipe(
    decoder: Decoder,
    recipe: Recipe,
    weights: WeightsSection | None,
    text: CheckpointText,
    progress: Progress = lambda _: None,
) -> CalibratedTensors | None:
    """Bind a deferred `decoder` to the weights that `weights` asks for, where it asks for a search.

    `text` has the tokenizer. Raises `RecipeError` for a file of too little text, and as `calibrate`.
    """
    path = recipe.calibration_path(weights)
    if path is None or weights is None:
        return None
    longest = min(_LONGEST, decoder.config.max_positions)
    encoded = text.encode(read_prompts(path))
    pieces = [ids[first : first + longest] for ids in encoded for first in range(0, len(ids), longest)]
    if sum(map(len, pieces)) < _LEAST:
        raise RecipeError(
            f"{path} holds {sum(map(len, pieces))} tokens, too few to choose weights by; give some thousands"
        )
    return calibrate(decoder, pieces, weights.form, progress)
