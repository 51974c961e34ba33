"""`--sampling`: how tokens are chosen, as it is written and as the column that names it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import cast

from outrider.plans.errors import RequestError
from outrider.runtime.options.kinds import Real, Whole
from outrider.runtime.options.options import OPTIONS, Options
from outrider.runtime.sampling import SamplingParams

GREEDY = SamplingParams()
_KEYS = [
    each.name
    for each in fields(SamplingParams)
    if isinstance(OPTIONS[each.name].kind, Real | Whole) and each.name != "stream_id"
]
_EXAMPLE = "write greedy, or such as temperature=0.7,top_p=0.9,seed=3"


def read_sampling(text: str) -> SamplingParams:
    """`greedy`, or settings by the runtime's names; for `add_argument`'s `type`."""
    if text == "greedy":
        return GREEDY
    settings: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS or key in settings:
            reason = "stands twice" if key in settings else f"is none of {', '.join(_KEYS)}"
            raise argparse.ArgumentTypeError(f"{key!r} in {text!r} {reason}; {_EXAMPLE}")
        kind = OPTIONS[key].kind
        try:
            number = int(value) if isinstance(kind, Whole) else float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{key} in {text!r} is {value!r}, which is no number; {_EXAMPLE}"
            ) from None
        try:
            settings[key] = kind.check(number, key)
        except RequestError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    if not settings.get("temperature"):
        raise argparse.ArgumentTypeError(f"{text!r} has no temperature above 0, and would be greedy; {_EXAMPLE}")
    return SamplingParams(**settings)  # type: ignore[arg-type]


def name_sampling(sampling: SamplingParams) -> str:
    """As `read_sampling` takes it; what has its default is left out."""
    if not sampling.temperature:
        return "greedy"
    return ",".join(f"{key}={value:g}" if key != "seed" else f"{key}={value}" for key, value in _written(sampling))


def _written(sampling: SamplingParams) -> list[tuple[str, float]]:
    return [(key, value) for key in _KEYS if (value := getattr(sampling, key)) != getattr(GREEDY, key)]


def as_options(sampling: SamplingParams) -> Options:
    return cast(Options, {key: getattr(sampling, key) for key in _KEYS})
