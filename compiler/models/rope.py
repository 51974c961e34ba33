"""Rotary position tables with the scalings in use: none, linear, llama3, yarn, longrope, a divisor for each frequency.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); the Llama 3.1 reference
code's frequency bands; YaRN (arXiv 2309.00071) section 3.4; LongRoPE (arXiv 2402.13753). transformers is the oracle in
the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
LEAST_ROPE_THETA, MOST_ROPE_THETA = 1.001, 1e12
"""Accepted bases: frequencies must fall from one dimension to the next, and stay finite in float32."""
_LEAST = {"factor": 1e-6, "beta_fast": 1e-6, "beta_slow": 1e-6, "attention_factor": 1e-6}
_MOST = {"factor": 1e12, "original_max_position_embeddings": 1e12}
_MOST_ELSE = 1e6
_TABLES = ("short_factor", "long_factor")
_MOST_DIVISORS = 2**12
_LEAST_BAND = 1e-6  # least distance between llama3's two factors
"""Limits of the other settings, far from any in use; within them every table is finite."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies. Field names are Hugging Face's; `kind` is its `rope_type`, or "divisors"."""

    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()

    @classmethod
    def from_huggingface(cls, parameters: Mapping[str, Any]) -> RopeScaling:
        """Read a `rope_scaling` / `rope_parameters` object. Raises `ValueError` with the key at fault."""
        values = {key: value for key, value in parameters.items() if value is not None}
        older = values.pop("type", None)
        kind = values.pop("rope_type", older or "default")
        kind = _OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind
        older = _OLDER_KINDS.get(older, older) if isinstance(older, str) else older
        if older not in (None, kind):
            raise ValueError(f"rope scaling's 'rope_type' is {kind!r} and its older spelling 'type' is {older!r}")
        if kind not in KINDS:
            raise ValueError(f"rope scaling {kind!r} is not supported; known kinds: {', '.join(KINDS)}")
        known = {f.name for f in fields(cls)} - {"kind", "divisors", *(() if kind == "longrope" else _TABLES)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"rope scaling has an unknown key {unknown[0]!r}; known keys: {', '.join(sorted(known))}. "
                "Engines differ in what others mean: say what is to hold as target.rope_scaling in the recipe"
            )
        for key, value in values.items():
            _check_value(key, value)
        wanted = _TABLES if kind == "longrope" else () if kind == "default" else ("factor",)
        lacking = next((key for key in wanted if key not in values), None)
        if lacking is not None:
            raise ValueError(f"rope scaling {kind!r} needs a {lacking!r}")
        values |= {key: tuple(map(float, values[key])) for key in _TABLES if key in values}
        scaling = cls(kind=kind, **values)
        if scaling.high_freq_factor - scaling.low_freq_factor < _LEAST_BAND:
            raise ValueError("rope scaling's 'high_freq_factor' must be greater than 'low_freq_factor'")
        if kind in ("llama3", "yarn", "longrope") and scaling.original_max_position_embeddings <= 0:
            raise ValueError(f"rope scaling {kind!r} needs 'original_max_position_embeddings'")
        return scaling

    @classmethod
    def from_divisors(cls, divisors: tuple[float, ...]) -> RopeScaling:
        """Return the scaling that divides each frequency by its own number, as GGUF files have it. Raises `ValueError`
        for a divisor that is out of bounds."""
        _check_divisors(divisors)
        return cls(kind="divisors", divisors=divisors)

    def for_context(self, context: int) -> RopeScaling:
        """Return the scaling of sequences of up to `context` tokens.

        longrope has a table of divisors for contexts up to the original one and a table for longer ones. A plan takes
        the one for its longest context, whatever a sequence's length: keys that were rotated by one table would be
        wrong under the other.
        """
        if self.kind != "longrope":
            return self
        divisors = self.long_factor if context > self.original_max_position_embeddings else self.short_factor
        return RopeScaling(kind="divisors", divisors=divisors, attention_factor=self.magnitude)

    @property
    def magnitude(self) -> float:
        """What longrope multiplies cosines and sines by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


_OLDER_KINDS = {"su": "longrope"}


def _check_divisors(divisors: Sequence[object]) -> None:
    least, most = _LEAST["factor"], _MOST["factor"]
    for divisor in divisors:
        if not isinstance(divisor, int | float) or isinstance(divisor, bool) or not least <= divisor <= most:
            raise ValueError(f"a divisor of a rotary frequency is {divisor!r}, and must be from {least:g} to {most:g}")


def _check_value(key: str, value: object) -> None:
    if key in _TABLES:
        if not isinstance(value, list | tuple) or not 0 < len(value) <= _MOST_DIVISORS:
            raise ValueError(f"rope scaling's {key!r} must be a list of numbers, found {value!r:.60}")
        return _check_divisors(value)
    if key == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"rope scaling's {key!r} must be true or false, found {value!r}")
        return None
    wanted = int if key == "original_max_position_embeddings" else int | float
    least, most = _LEAST.get(key, 0), _MOST.get(key, _MOST_ELSE)
    if not isinstance(value, wanted) or isinstance(value, bool) or not least <= value <= most:
        noun = "an integer" if wanted is int else "a number"
        raise ValueError(f"rope scaling's {key!r} must be {noun} from {least:g} to {most:g}, found {value!r:.60}")
    return None


@dataclass(frozen=True)
class Rope:
    """A rotation: the base of its frequencies, their scaling, and how many numbers of a head are rotated."""

    theta: float
    scaling: RopeScaling
    size: int

    def tables(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute the cosines and sines of all positions: two float32 arrays `[positions, size / 2]`."""
        return rope_tables(self.theta, self.size, positions, self.scaling)


def rope_tables(
    theta: float, head_dim: int, positions: int, scaling: RopeScaling
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute the cosines and sines of all positions: two float32 arrays `[positions, head_dim / 2]`.

    `head_dim` are the rotated numbers of a head. Raises `ValueError` where the scaling has divisors for another size.
    """
    frequencies, magnitude = _frequencies(theta, head_dim, scaling.for_context(positions))
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    return (
        (np.cos(angles) * magnitude).astype(np.float32),
        (np.sin(angles) * magnitude).astype(np.float32),
    )


def _frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> tuple[NDArray[np.float32], float]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if scaling.kind == "default":
        return plain, 1.0
    if scaling.kind == "divisors":
        if len(scaling.divisors) != len(plain):
            raise ValueError(f"{len(scaling.divisors)} divisors of {len(plain)} rotary frequencies")
        magnitude = 1.0 if scaling.attention_factor is None else scaling.attention_factor
        return (plain / np.array(scaling.divisors, np.float32)).astype(np.float32), magnitude
    if scaling.kind == "linear":
        return (plain / np.float32(scaling.factor)).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, theta, head_dim, scaling), _yarn_magnitude(scaling)


def _llama3(plain: NDArray[np.float32], scaling: RopeScaling) -> NDArray[np.float32]:
    """Divide the frequencies of long wavelengths by the factor, keep those of short ones, blend those between."""
    wavelength = 2 * math.pi / plain
    rotations = scaling.original_max_position_embeddings / wavelength
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32)


def _yarn(plain: NDArray[np.float32], theta: float, head_dim: int, scaling: RopeScaling) -> NDArray[np.float32]:
    """Keep dimensions that turn often within the original context, interpolate slow ones."""

    def dimension(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a ramp of no width becomes a step
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / width
    interpolated: NDArray[np.float32] = np.clip(ramp, 0.0, 1.0)
    return (plain * (1 - interpolated) + plain / scaling.factor * interpolated).astype(np.float32)


def _yarn_magnitude(scaling: RopeScaling) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
