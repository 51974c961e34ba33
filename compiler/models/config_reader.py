"""Values of a `config.json` by key; a wrong one is an error that names the file, the key and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.compiler.models.rope import LEAST_ROPE_THETA, MOST_ROPE_THETA
from outrider.plans.errors import CheckpointError

_MOST = {
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "hidden_size": 2**18,
    "target_hidden_size": 2**18,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "vocab_size": 2**24,
    "draft_vocab_size": 2**24,
    "block_size": 2**10,
}
"""Largest accepted sizes, a few times those of any published model, so that a typo does not start an endless build."""
_MOST_POSITIONS = 2**31 - 1
_LEAST_FACTOR, _MOST_FACTOR = 1e-6, 1e6
"""Limits of multipliers and caps, far from any in use."""
ROPE_THETA = 10000.0
"""Base of the rotary frequencies where neither a key nor the family gives one."""


class Reader:
    """Values of a `config.json` by key; a wrong value raises `CheckpointError` naming file, key and value."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw, self._path = raw, path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self._path}: {key} must be a positive integer, found {value!r}")
        most = _MOST.get(key, _MOST_POSITIONS)
        if value > most:
            raise CheckpointError(f"{self._path}: {key} is {value}; at most {most} can be compiled")
        return value

    def whole(self, key: str, default: int) -> int:
        """Return an integer that may be 0."""
        return 0 if self._raw.get(key) == 0 and self._raw[key] is not False else self.integer(key, default)

    def number(self, key: str, default: float, *, least: float, most: float) -> float:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise CheckpointError(f"{self._path}: {key} must be a number from {least:g} to {most:g}, found {value!r}")
        return float(value)

    def rope_theta(self, default: float) -> float:
        """Return the base of the rotary frequencies."""
        return self.number("rope_theta", default, least=LEAST_ROPE_THETA, most=MOST_ROPE_THETA)

    def positive(self, key: str, default: float | None) -> float | None:
        """Return a factor, or None where the key says null, or is absent and `default` is None."""
        value = self._raw.get(key, default)
        return None if value is None else self.factor(key, value)

    def factor(self, key: str, default: float) -> float:
        """Return a factor."""
        return self.number(key, default, least=_LEAST_FACTOR, most=_MOST_FACTOR)

    def rms_norm_eps(self, default: float = 1e-6) -> float:
        """Return the epsilon that RMS norms add to the mean of squares, in float32."""
        return self.number("rms_norm_eps", default, least=1e-30, most=1.0)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._path}: {key} must be true or false, found {value!r}")
        return value


def read_json(path: Path, missing: str = "a checkpoint folder needs config.json and *.safetensors") -> dict[str, Any]:
    """Read the JSON object in the file. Raises `CheckpointError`; `missing` is its advice where there is no file."""
    try:
        if path.exists() and not path.is_file():  # a pipe, or a device: reading it may never end
            raise OSError("it is no file")
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; {missing}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold one JSON object")
    return raw
