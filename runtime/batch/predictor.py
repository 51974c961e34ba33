"""`OutriderPredictor`: a plan as a class for `ray.data.Dataset.map_batches`. Ray itself is not needed here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from outrider.plans.errors import RequestError
from outrider.runtime.batch.answering import Answering, BatchAnswer
from outrider.runtime.batch.body import check_columns
from outrider.runtime.batch.loading import LoadOptions, check_visible, load_for_batches
from outrider.runtime.batch.reading import as_json, json_of, rows_of_table
from outrider.runtime.batch.requests import BatchRequest, why_not_an_id

if TYPE_CHECKING:
    import pyarrow as pa

ADDED = ("status_code", "text", "finish_reason", "error", "result")
"""Columns that a prediction adds, and a `custom_id` where there is none."""


class OutriderPredictor:
    """Loads a plan once, and answers batches of requests:

        dataset.map_batches(OutriderPredictor, fn_constructor_kwargs={"plan": "build/branches"}, concurrency=2)

    A row is a request. It has either `prompt` (text) or `messages` (a list of messages, or its JSON as text), and any
    fields of OpenAI's bodies and of ours beside it (`max_tokens`, `temperature`, `seed`, ...), null where it has not;
    or it is a line of OpenAI's batches, with `method`, `url` and `body`. The `custom_id` is its name, from which a seed
    and all ids are derived; without that column, it is a hash of the request.

    Columns of the batch stay. Added are `custom_id`, where a row has none, `status_code` (int: 200, or 4xx of a request
    that is refused), `text` of the first choice ("" where there is none), `finish_reason` ("" likewise),
    `error` (why it was refused, or ""), and `result`, the line that `outrider batch` writes for it. A row's result does
    not depend on other rows, on the size of batches, or on the number of actors.
    """

    def __init__(
        self,
        plan: str | PathLike[str],
        *,
        model: str | None = None,
        created: int = 0,
        keep: Sequence[str] = (),
        **options: Unpack[LoadOptions],
    ) -> None:
        """Load the plan folder, which every node must see, with the options of `load_for_batches`.

        Answers name the `model` (default: the plan's name) and the time `created`, seconds since 1970. Columns
        in `keep` are no part of requests. Raises what `Runtime.load` does, and RequestError for a plan that is not
        there, and for columns in `keep` that answers would overwrite.
        """
        if overwritten := [name for name in keep if name in (*ADDED, "custom_id")]:
            raise RequestError(
                f"keep has {overwritten[0]!r}, a column that answers are written to; rename it, such as by "
                "Dataset.rename_columns."
            )
        check_visible(Path(plan), "plan.json")
        self._answering = Answering(load_for_batches(plan, **options), model, created)
        self._keep = tuple(keep)

    def __call__(self, batch: dict[str, NDArray[Any]] | pa.Table) -> dict[str, NDArray[Any]] | pa.Table:
        """Raises RequestError for columns that no request has; all that a prediction added before are replaced."""
        given = list(batch) if isinstance(batch, dict) else batch.column_names
        known = (*self._keep, *ADDED) if set(ADDED) <= set(given) else self._keep
        names = [name for name in given if name not in known]
        check_columns(names, "The batch")
        if isinstance(batch, dict):
            added = self._added(_rows({name: batch[name] for name in names}))
            return dict(batch) | {name: _array(values) for name, values in added.items()}
        import pyarrow as pa

        added = self._added(rows_of_table(batch.select(names)))
        kept = {name: batch.column(name) for name in given}
        return pa.table(kept | {name: pa.array(values) for name, values in added.items()})

    def _added(self, rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        requests = [_request(row, place) for place, row in enumerate(rows)]
        answered = sorted(self._answering.answer(requests), key=lambda each: each.number)
        columns = zip(*map(_values, answered), strict=True) if answered else [()] * len(ADDED)
        names = {"custom_id": [request.custom_id for request in requests]}
        return names | {name: list(column) for name, column in zip(ADDED, columns, strict=True)}


def _request(row: Mapping[str, Any], place: int) -> BatchRequest:
    try:
        text = json_of(row)
    except (TypeError, ValueError) as error:
        raise RequestError(f"Row {place} of the batch is no JSON ({error}).") from None
    if "custom_id" not in row:
        return BatchRequest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32], text)
    if wrong := why_not_an_id(row["custom_id"]):
        raise RequestError(f"Row {place} of the batch {wrong}.")
    return BatchRequest(row["custom_id"], text)


def _rows(columns: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    values = {name: [_plain(value) for value in column] for name, column in columns.items()}
    count = len(next(iter(values.values()))) if values else 0
    return [as_json({name: column[place] for name, column in values.items()}) for place in range(count)]


def _plain(value: Any) -> Any:
    """A value of NumPy's as Python has it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _array(values: list[Any]) -> NDArray[Any]:
    return np.array(values, np.int64) if values and isinstance(values[0], int) else np.array(values, object)


def _values(answered: BatchAnswer) -> tuple[object, ...]:
    """The values of the columns `ADDED`."""
    response = answered.result["response"]
    choice: dict[str, Any] = next(iter(response["body"].get("choices", ())), {})
    text = choice.get("text") or choice.get("message", {}).get("content") or ""
    error = response["body"].get("error", {}).get("message", "")
    line = answered.line.decode().rstrip("\n")
    return response["status_code"], text, choice.get("finish_reason", ""), error, line
