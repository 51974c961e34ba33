"""`--sampling`: how tokens are chosen, as it is written and as the column that names it."""

from __future__ import annotations

import argparse
from typing import Any, cast

from outrider.plans.errors import RequestError
from outrider.plans.sampling import Sampling
from outrider.runtime.options.kinds import Real, Whole
from outrider.runtime.options.options import OPTIONS, Options

GREEDY = Options(temperature=0.0, seed=0)
_KEYS = [name for name in (*Sampling._fields, "seed") if isinstance(OPTIONS[name].kind, Real | Whole)]
_EXAMPLE = "write greedy, or such as temperature=0.7,top_p=0.9,seed=3"


def read_sampling(text: str) -> Options:
    """`greedy`, or settings by the names of options; for `add_argument`'s `type`. The seed is 0 unless it is given."""
    if text == "greedy":
        return GREEDY
    settings: dict[str, Any] = {}
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
    return cast(Options, {"seed": 0} | settings)


def name_sampling(sampling: Options) -> str:
    """As `read_sampling` takes it; what has its default is left out."""
    if not sampling.get("temperature"):
        return "greedy"
    known = {name: OPTIONS[name].default for name in _KEYS} | {"seed": 0}
    given = {name: value for name, value in sampling.items() if name in known and value != known[name]}
    return ",".join(f"{name}={given[name]!r}" for name in _KEYS if name in given)
