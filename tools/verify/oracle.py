"""What `outrider verify` holds a plan against: the checkpoint run by transformers, else by our own decoder.

transformers reads config.json on its own, so that a key that we misread shows. Our decoder shares that reading with
the plan: with it, `verify` looks at export, lowering and runtime alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.models.config_reader import read_json
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.opening import read_config, stores_integers
from outrider.compiler.recipe import Recipe
from outrider.plans.errors import CheckpointError, RequestError
from outrider.plans.extras import install
from outrider.tools.verify.quantized import PlanWeights

OracleChoice = Literal["auto", "transformers", "decoder"]
_OLDEST = 5
"""Version of transformers from which on `rope_parameters` are read."""


class Oracle(Protocol):
    """A model in PyTorch on the CPU, in float32. `name` says which one, for the reader."""

    name: str

    def logits(self, token_ids: list[int], last: int) -> Tensor:
        """Logits f32 `[last, vocab]` of the last positions of one sequence."""
        ...


def load_oracle(recipe: Recipe, choice: OracleChoice = "auto", weights: PlanWeights | None = None) -> Oracle:
    """The oracle of the recipe's target, its rotary scaling replaced where the recipe says so.

    With `weights` it has those of a plan.
    "auto" is transformers where a version that will do is installed, and the checkpoint stores numbers: weights stored
    as integers are read by our decoder. Raises `RequestError` where the one asked for is
    not there, `CheckpointError` where it cannot load the checkpoint.
    """
    installed, lacking = _transformers()
    if stores_integers(recipe.checkpoint_path, recipe.rope_scaling):
        lacking = f"{recipe.checkpoint_path.name} stores weights as integers"
    if choice == "transformers" and lacking:
        raise RequestError(f"The oracle transformers is asked for, and {lacking}.")
    if choice == "decoder" or lacking:
        return _OwnDecoder(recipe, lacking if choice == "auto" else "", weights)
    return _Transformers(recipe, installed, weights)


class _OwnDecoder:
    def __init__(self, recipe: Recipe, why: str, weights: PlanWeights | None) -> None:
        self.name = f"Outrider's own decoder in PyTorch {torch.__version__}" + (f" ({why})" if why else "")
        self._decoder = load_decoder(recipe.checkpoint_path, "float32", recipe.rope_scaling, recipe.capacity.context)
        if weights is not None:
            weights.give(self._decoder)

    def logits(self, token_ids: list[int], last: int) -> Tensor:
        return sequence_logits(self._decoder, token_ids)[-last:]


class _Transformers:
    def __init__(self, recipe: Recipe, installed: str, weights: PlanWeights | None) -> None:
        transformers: Any = import_module("transformers")
        self.name = f"transformers {installed}"
        path = recipe.checkpoint_path
        with _quiet():
            try:
                given = _rope(recipe)
                if _is_mxfp4(path):
                    given["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
                self._model = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **given
                ).eval()
            except Exception as error:  # any error of its loaders
                raise CheckpointError(
                    f"{path} cannot be loaded by {self.name} ({type(error).__name__}: {error}); --oracle decoder "
                    "compares with our own decoder instead"
                ) from error
        if weights is not None:
            weights.give(self._model)

    @torch.no_grad()
    def logits(self, token_ids: list[int], last: int) -> Tensor:
        found = self._model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=last)
        logits: Tensor = found.logits[0].float()
        return logits


def _is_mxfp4(path: Path) -> bool:
    """Return whether experts are stored in MXFP4, which transformers turns into floats where it is configured to."""
    settings = read_json(path / "config.json").get("quantization_config") if path.is_dir() else None
    return isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"


def _rope(recipe: Recipe) -> dict[str, object]:
    """What the plan has in place of the checkpoint's rotation, for transformers: a scaling goes with its base."""
    section, config = recipe.target.rope_scaling, read_config(recipe.checkpoint_path, recipe.rope_scaling)
    rotary: dict[str, object] = {"rope_theta": config.rope_theta}
    if section is not None:
        rotary |= section.model_dump(exclude_none=True)
        if config.rotary_size is not None:
            rotary["partial_rotary_factor"] = config.rotary_size / config.head_dim
    elif config.rope_scaling.kind == "longrope":
        # transformers changes the table within a sequence; a plan has the one of its context.
        scaling = config.rope_scaling
        divisors = list(scaling.for_context(recipe.capacity.context).divisors)
        rotary |= {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": scaling.factor,
            "attention_factor": scaling.magnitude,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "partial_rotary_factor": (config.rotary_size or config.head_dim) / config.head_dim,
        }
    else:
        return {}
    local = config.local_rope
    if local is None:
        return {"rope_parameters": rotary}
    sliding = {"rope_type": "default", "rope_theta": local.theta}
    return {"rope_parameters": {"full_attention": rotary, "sliding_attention": sliding}}


def _transformers() -> tuple[str, str]:
    """The installed version, and what keeps it from being used, as a clause; one of them is empty."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return "", f"transformers is not installed; {install('verify')}"
    if int(installed.partition(".")[0]) < _OLDEST:
        return "", f"transformers {installed} is older than {_OLDEST}"
    return installed, ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and warnings, which are not about the plan."""
    logging: Any = import_module("transformers.utils.logging")
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
