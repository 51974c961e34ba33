"""A batch's input: a file of JSON lines, or of parquet.

Faults of lines without an id, which can have no result, are found before anything runs: the file is read first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.plans.errors import RequestError
from outrider.runtime.batch.body import check_columns
from outrider.runtime.batch.requests import BatchRequest, parse, why_not_an_id

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 5  # faults of a file that are named
_LONGEST = 2**26  # bytes of a line
_ROWS = 1024  # of parquet, at a time
_WHOLE = 2**53  # below it a float that is whole is that number and no other


def read_requests(path: Path) -> list[BatchRequest]:
    """The requests of a file, in its order; a file whose name ends in `.parquet` is one.

    Raises RequestError, which names the first faulty lines, for lines that are no JSON object, or have no `custom_id`,
    or that of another; and for columns that are none of a request.
    """
    parquet = path.suffix == ".parquet"
    try:
        rows = _rows_of_parquet(path) if parquet else _rows_of_lines(path)
        requests, faults = _checked(rows, "row" if parquet else "line")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise RequestError(
            f"{path}: {'; '.join(faults[:_SHOWN])}{more}. Nothing was run: give every request an id of its own, one "
            "JSON object a line."
        )
    if not requests:
        raise RequestError(f"{path} has no request; write one JSON object a line.")
    return requests


def _checked(rows: Iterable[tuple[int, str, Any]], what: str) -> tuple[list[BatchRequest], list[str]]:
    """The requests of rows, and what is wrong with others; a row that is a text is what was wrong with it."""
    requests, faults, places = [], list[str](), dict[str, int]()
    for place, text, row in rows:
        if isinstance(row, str):
            faults.append(f"{what} {place} is no JSON ({row})")
        elif not isinstance(row, dict):
            faults.append(f"{what} {place} is no object")
        elif wrong := why_not_an_id(row.get("custom_id")):
            faults.append(f"{what} {place} {wrong}")
        elif (custom_id := row["custom_id"]) in places:
            faults.append(f"{what} {place} has the custom_id {custom_id!r} of {what} {places[custom_id]}")
        else:
            places[custom_id] = place
            requests.append(BatchRequest(custom_id, text))
    return requests, faults


def _rows_of_lines(path: Path) -> Iterator[tuple[int, str, Any]]:
    with path.open("rb") as file:
        for place, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
            if len(line) == _LONGEST:  # a device's may never end
                raise RequestError(f"{path}: line {place} is longer than {_LONGEST:,} bytes, which no request is.")
            stripped = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not stripped:
                continue
            try:
                text = stripped.decode()
                yield place, text, parse(text)
            except ValueError as error:  # UnicodeDecodeError is one
                yield place, "", str(error).partition(":")[0]


def _rows_of_parquet(path: Path) -> Iterator[tuple[int, str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise RequestError(f"{path} is no parquet: {error}.") from None
    check_columns(file.schema_arrow.names, str(path))
    place = 0
    for batch in file.iter_batches(_ROWS):
        for row in rows_of_table(batch):
            place += 1
            try:
                yield place, json_of(row), row
            except (TypeError, ValueError) as error:  # a date, or bytes; an infinity
                yield place, "", str(error)


def rows_of_table(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a table, as `as_json` has them."""
    return [as_json(row) for row in table.to_pylist()]


def as_json(value: Any) -> Any:
    """A value of a table without nulls and NaNs in objects: a column cannot leave them out otherwise. A float that
    is a whole number is an int, as a column with nulls may have had to be floats. It depends on no other row."""
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items() if not _missing(each)}
    if isinstance(value, list):
        return [None if _missing(each) else as_json(each) for each in value]
    return int(value) if isinstance(value, float) and abs(value) < _WHOLE and value.is_integer() else value


def json_of(row: Mapping[str, Any]) -> str:
    """A row of a table as text that `parse` takes. Raises TypeError and ValueError for bytes, dates, infinities, and
    what is nested too deeply."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    parse(text)
    return text


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))
