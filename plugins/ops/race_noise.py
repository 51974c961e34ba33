"""RaceNoise: what a drafter knows of the races that the target will run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.sampling import SETTINGS
from outrider.plugins.cuda.launches import THREADS, make_launch
from outrider.plugins.ops.op import Op
from outrider.plugins.ops.row_choices import CHOICE_SLOTS, PURPOSE, SLOTS, VOCABULARY
from outrider.plugins.reference.race import RaceKey, exponential, noise_words
from outrider.plugins.schema import INTEGER, OpSchema, Purpose, TensorSpec
from outrider.plugins.tensorrt.plugin import Plugin

SCHEMA = OpSchema(
    name="RaceNoise",
    version=2,
    doc="""What a drafter looks at: the noise of the races after each tip, and the branch's settings in float32.

    noise[b, d, i] is that of token i at (seed[b], stream[b], tip_position[b] + 1 + d, purpose), exponentially
    distributed: by the default purpose the target's own, so that the drafter runs the race that the target will.
    Not written where the temperature of b is 0. draft_sampling is sampling, rounded to the nearest float32: what is
    drafted is a guess, and backends without float64 make it too.
    Errors: ValueError for an unknown purpose.""",
    inputs=(
        TensorSpec(names.TIP_POSITION, INTEGER, (SLOTS,)),
        *CHOICE_SLOTS,
    ),
    outputs=(
        TensorSpec(names.NOISE, "float32", (SLOTS, "depths", VOCABULARY)),
        TensorSpec(names.DRAFT_SAMPLING, "float32", (SLOTS, SETTINGS)),
    ),
    attributes=(PURPOSE,),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_race_noise",
    numbers=("B", "depths", "V", "purpose"),
    blocks=lambda s: -(-s["B"] * s["depths"] * s["V"] // (4 * THREADS)),
)
_PLUGIN = Plugin(
    name="RaceNoise",
    launch=_LAUNCH,
    inputs=SCHEMA.inputs,
    outputs=SCHEMA.outputs,
    attributes=("depths", "V", "purpose"),
)
OP = Op(SCHEMA, (_PLUGIN,), _LAUNCH)


def race_noise(
    tip_position: NDArray[np.int64],
    seed: NDArray[np.uint64],
    stream: NDArray[np.int64],
    depths: int,
    vocabulary: int,
    purpose: Purpose = Purpose.TARGET,
) -> NDArray[np.float32]:
    """Return noise float32 `[B, depths, vocabulary]` of the races at the positions after each branch's tip.

    By the default purpose these are the races that the target will run.
    """
    ids = np.arange(vocabulary)
    found = [
        [
            exponential(noise_words(ids, RaceKey(int(s), int(r), int(tip) + 1 + depth, purpose)))
            for depth in range(depths)
        ]
        for tip, s, r in zip(tip_position, seed, stream, strict=True)
    ]
    return np.array(found, np.float32).reshape(len(tip_position), depths, vocabulary)
