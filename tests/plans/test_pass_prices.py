"""The table of prices beside a plan: read strictly, no part of the plan, and used only where it was measured."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.plans.pass_prices import PASS_PRICES, PassPrices, Price, read_pass_prices, write_pass_prices
from outrider.plans.plan import open_plan
from outrider.runtime.pass_prices import conditions_here

TABLE = PassPrices(
    identity="0" * 64,
    backend="onnxruntime-cpu",
    device="a processor",
    threads=2,
    context=512,
    prices=(Price(rows=1, ms=1.0), Price(rows=2, ms=1.25), Price(rows=8, ms=2.0)),
)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_pass_prices(tmp_path) is None
    assert write_pass_prices(TABLE, tmp_path) == tmp_path / "prices.json"
    assert read_pass_prices(tmp_path) == TABLE


def changed(**more: Any) -> str:
    return json.dumps(TABLE.model_dump(mode="json") | more)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "the file: Input should be an object"),
        ("{", "Invalid JSON"),
        (changed(threads=0), "threads"),
        (changed(prices=[]), "prices"),
        (changed(prices=[{"rows": 2, "ms": 1.0}]), "rows do not ascend from 1"),
        (changed(prices=[{"rows": 1, "ms": 1.0}, {"rows": 1, "ms": 2.0}]), "rows do not ascend from 1"),
        (changed(prices=[{"rows": 1, "ms": float("nan")}]), "prices.0.ms"),
        (changed(prices=[{"rows": each, "ms": 1.0} for each in range(1, 514)]), "prices"),
        (" " * 2**16 + changed(), "larger than any table"),
        ("\udcff", "cannot be read"),
    ],
    ids=lambda each: each[:30].strip(),
)
def test_a_damaged_table_is_named_with_what_to_do(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / PASS_PRICES).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(PlanError, match=rf"{PASS_PRICES}.*{said}.*`outrider tune PLAN --prices` writes it anew"):
        read_pass_prices(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / PASS_PRICES).mkdir()
    with pytest.raises(PlanError, match=r"prices\.json cannot be written"):
        write_pass_prices(TABLE, tmp_path)
    for name, make in (("a", Path.mkdir), ("b", os.mkfifo), ("c", lambda path: path.symlink_to("/etc/hostname"))):
        (tmp_path / name).mkdir()
        make(tmp_path / name / PASS_PRICES)
        with pytest.raises(PlanError, match=r"prices\.json is a link, or no file"):
            read_pass_prices(tmp_path / name)


def test_a_plan_loads_without_a_table_that_cannot_be_read(plan: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Runtime.load(plan, threads=1).loaded.prices is None
    (plan / PASS_PRICES).write_text(changed(later=1))
    assert Runtime.load(plan, threads=1).loaded.prices is None
    (record,) = [each for each in caplog.records if PASS_PRICES in each.getMessage()]
    assert (record.name, record.levelname) == ("outrider", "WARNING")
    assert f"{plan / PASS_PRICES}: later: Extra inputs are not permitted; `outrider tune" in record.getMessage()


@pytest.mark.parametrize(
    "other", [{}, {"identity": "1" * 64}, {"backend": "cuda"}, {"device": "another", "threads": 3}], ids=str
)
def test_a_table_holds_only_where_it_was_measured(
    plan: Path, caplog: pytest.LogCaptureFixture, other: dict[str, Any]
) -> None:
    here = conditions_here(open_plan(plan), "onnxruntime-cpu", 1)
    write_pass_prices(TABLE.model_copy(update=vars(here) | other), plan)
    with caplog.at_level(logging.INFO, "outrider"):
        prices = Runtime.load(plan, threads=1).loaded.prices
    assert (prices is None) == bool(other)
    said = [record.getMessage() for record in caplog.records if PASS_PRICES in record.getMessage()]
    assert len(said) == bool(other)
    for name, value in list(other.items())[:1]:
        assert f"was measured with {name} {value}" in said[0]
