"""Sample: one token for each new token with logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.sampling import NOBODY
from outrider.plugins.cuda.launches import STATUS, make_launch
from outrider.plugins.ops import row_choices as rows
from outrider.plugins.ops.op import Op
from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.schema import INTEGER, OpSchema, Purpose, TensorSpec

SCHEMA = OpSchema(
    name="Sample",
    version=4,
    doc="""One token for each new token with logits.

    committed[m] = choice(logits[m], sampling[b], noise), with n = logit_indices[m], b = branch[n] and the noise of
    (seed[b], stream[b], positions[n] + 1, purpose): an exponential race among the tokens that the filters keep. A token
    of branch NOBODY fills up the step, and committed[m] is -1.
    Errors: ValueError for extents, indices or settings out of range, and for logits with NaN or with -inf alone.""",
    inputs=rows.CHOICE_INPUTS,
    outputs=(rows.COMMITTED,),
    attributes=(rows.PURPOSE,),
    extents=(names.NEW, names.LOGITS),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_sample",
    numbers=("V", "B", "purpose"),
    blocks=rows.share_blocks,
    scratch={**rows.SHARED_OUT, **rows.ARRIVED},
)
ROW_SHARES = rows.share_plugin(
    SCHEMA,
    "RowShares",
    "outrider_row_shares",
    (),
    guard=f"within({names.LOGIT_INDICES}[block_index() / shares_of(V)], {names.NEW})",
)
_CHOICE = rows.choice_plugin(
    SCHEMA,
    "RowChoice",
    "outrider_row_choice",
    SCHEMA.outputs,
    guard=f"within({names.LOGIT_INDICES}[block_index()], {names.NEW})",
    reported=(TensorSpec(STATUS, INTEGER, (names.LOGITS,)),),
)
OP = Op(SCHEMA, (ROW_SHARES, _CHOICE), _LAUNCH)


def sample(
    logits: NDArray[np.float32],
    logit_indices: NDArray[np.int64],
    positions: NDArray[np.int64],
    branch: NDArray[np.int64],
    slots: SamplingSlots,
    purpose: Purpose = Purpose.TARGET,
) -> NDArray[np.int64]:
    """Choose tokens int64 `[M]` from `logits` `[M, V]` at `logit_indices`; `positions` and `branch` are `[N]`."""
    chosen = [
        -1 if branch[row] == NOBODY else slots.choose(logits[m], int(branch[row]), int(positions[row]), purpose)
        for m, row in enumerate(logit_indices)
    ]
    return np.array(chosen, dtype=np.int64)
