"""Rotary position tables with the scalings in use: none, linear, llama3, yarn, longrope, a divisor for each frequency.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); the Llama 3.1 reference
code's frequency bands; YaRN (arXiv 2309.00071) section 3.4; LongRoPE (arXiv 2402.13753). transformers is the oracle in
the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from outrider.compiler.models.config_reader import STRICT, Factor, first_fault

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_TABLES = ("short_factor", "long_factor")
_LEAST_BAND = 1e-6  # least distance between llama3's two factors
# Limits far from any in use; within them every table is finite.
_Stretch = Annotated[float, Field(ge=1e-6, le=1e12)]
_Weight = Annotated[float, Field(ge=0, le=1e6)]
_Divisors = Annotated[tuple[_Stretch, ...], Field(max_length=2**12)]


@dataclass(frozen=True, config=STRICT)
class RopeScaling:
    """Scaling of rotary frequencies. Field names are Hugging Face's; `kind` is its `rope_type`, or "divisors", which
    divides each frequency by its own number, as GGUF files have it. Raises `ValueError` for a value out of bounds."""

    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "divisors"] = "default"
    factor: _Stretch = 1.0
    original_max_position_embeddings: Annotated[int, Field(ge=0, le=10**12)] = 0
    low_freq_factor: _Weight = 1.0
    high_freq_factor: _Weight = 4.0
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    attention_factor: Factor | None = None
    mscale: _Weight = 0.0
    mscale_all_dim: _Weight = 0.0
    truncate: bool = True
    short_factor: _Divisors = ()
    long_factor: _Divisors = ()
    divisors: _Divisors = ()

    @classmethod
    def from_huggingface(cls, parameters: Mapping[str, Any]) -> RopeScaling:
        """Read a `rope_scaling` / `rope_parameters` object. Raises `ValueError` with the key at fault."""
        values = {key: value for key, value in parameters.items() if value is not None}
        kinds = [_older(values.pop(key)) for key in ("rope_type", "type") if key in values]
        kind = kinds[0] if kinds else "default"
        if kinds[1:] not in ([], [kind]):
            raise ValueError(f"rope scaling's 'rope_type' is {kind!r} and its older spelling 'type' is {kinds[1]!r}")
        if kind not in KINDS:
            raise ValueError(f"rope scaling {kind!r} is not supported; known kinds: {', '.join(KINDS)}")
        known = {f.name for f in fields(cls)} - {"kind", "divisors", *(() if kind == "longrope" else _TABLES)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"rope scaling has an unknown key {unknown[0]!r}; known keys: {', '.join(sorted(known))}. "
                "Engines differ in what others mean: say what is to hold as target.rope_scaling in the recipe"
            )
        wanted = _TABLES if kind == "longrope" else () if kind == "default" else ("factor",)
        lacking = next((key for key in wanted if values.get(key) in (None, [])), None)
        if lacking is not None:
            raise ValueError(f"rope scaling {kind!r} needs a {lacking!r}")
        tables = {key: tuple(values[key]) for key in _TABLES if isinstance(values.get(key), list)}
        try:
            scaling = cls(**{"kind": kind, **values, **tables})
        except ValidationError as error:
            raise ValueError(f"rope scaling's {first_fault(error)}") from None
        if scaling.high_freq_factor - scaling.low_freq_factor < _LEAST_BAND:
            raise ValueError("rope scaling's 'high_freq_factor' must be greater than 'low_freq_factor'")
        if kind in ("llama3", "yarn", "longrope") and scaling.original_max_position_embeddings <= 0:
            raise ValueError(f"rope scaling {kind!r} needs 'original_max_position_embeddings'")
        return scaling

    def for_context(self, context: int) -> RopeScaling:
        """Return the scaling of sequences of up to `context` tokens.

        longrope has a table of divisors for contexts up to the original one and a table for longer ones. A plan takes
        the one for its longest context, for sequences of any length: keys that were rotated by one table would be
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


def _older(kind: object) -> object:
    """Return the present name of a kind."""
    return "longrope" if kind == "su" else kind


@dataclass(frozen=True, config=STRICT)
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
