"""One page that needs nothing beside it, with plots of whatever was measured."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.tools import output
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench.columns import COLUMNS
from outrider.tools.bench.plots import draw
from outrider.tools.bench.report import render

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def page(toy_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The page of a sweep without builds, and its figures as JSON."""
    folder = tmp_path_factory.mktemp("report") / "new"
    prompts = str(toy_plan.parent / "held_out.jsonl")
    arguments = ["sweep", str(toy_plan), "--prompts", prompts, "--count", "1", "--new", "16", "--reps", "2"]
    arguments += ["--drafters", "ngram,bushy,head", "--prompt-len", "20,60", "--depth", "own"]
    printed: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "print_json", printed.append)
        assert bench.main([*arguments, "--json", "--report", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    return (folder / "report.html").read_text(encoding="utf-8"), printed[0]


def plots_of(html: str) -> dict[str, str]:
    """SVG by title, as text."""
    found = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', html)
    return {title: base64.b64decode(data).decode("utf-8") for title, data in found}


def test_the_page_stands_alone(page: tuple[str, dict[str, Any]]) -> None:
    html, report = page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|@import|<script|url\((?!data:)""", html)
    plots = plots_of(html)
    assert list(plots) == [
        "Speed against tree size", "Acceptance by depth", "Where a round's time goes".replace("'", "&#39;"),
        "Time per token along the context",
    ]  # fmt: skip
    for svg in plots.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "xlink:href" in svg  # of its own parts alone
        assert not re.search(r'xlink:href="(?!#)', svg)
    assert f"plan {report['rows'][0]['identity'][:12]}" in html
    assert "python -m outrider.tools.bench sweep" in html
    assert "Synthetic" not in html


def test_every_row_and_figure_is_on_the_page(page: tuple[str, dict[str, Any]]) -> None:
    html, report = page
    lines = [line for line in html.splitlines() if line.startswith("<tr><td>")]
    main = [
        line for line in lines if line.startswith(("<tr><td>none", "<tr><td>ngram", "<tr><td>bushy", "<tr><td>head"))
    ]
    assert len(main) == len(report["rows"]) == 8
    names = [line.removeprefix("<tr><td>").partition("<")[0] for line in lines if line not in main]
    assert names == [*COLUMNS] * 2  # no more rows beside each other than a sheet of paper holds


def test_the_page_says_at_its_head_what_was_measured_where_and_when(page: tuple[str, dict[str, Any]]) -> None:
    html, report = page
    head = dict(re.findall(r"<tr><th>(\w+)</th><td>(?:<code>)?(.*?)(?:</code>)?</td></tr>", html))
    assert list(head) == ["machine", "date", "command", "plan"]
    assert report["machine"]["processor"] in head["machine"]
    assert head["date"] == report["time"]
    assert head["command"].startswith("python -m outrider.tools.bench sweep ")
    assert report["plan"] in head["plan"]
    assert html.index('class="head"') < html.index('class="second"')


def test_nothing_of_the_page_is_hidden_in_print(page: tuple[str, dict[str, Any]]) -> None:
    assert "<details" not in page[0]
    assert "display: none" not in page[0]
    assert ".wide { overflow: visible; }" in page[0].partition("@media print")[2]


def test_plots_say_what_their_axes_are(page: tuple[str, dict[str, Any]]) -> None:
    speed, acceptance, stages, along = plots_of(page[0]).values()
    for svg, words in (
        (speed, ["nodes verified, the tip included", "decoding, speedup over plain", "plain decoding", "3/2/9"]),
        (acceptance, ["depth, in drafted tokens", "rounds that accepted it, %", "head 4/2/12", "ngram 6 nodes"]),
        (stages, ["ms a round", "everything else", "target", "plain decoding, prompt 60"]),
        (along, ["tokens in the context", "ms a token, median", "prompts of 20 tokens", "bushy 3/2/9"]),
    ):
        for word in words:  # letters are drawn; what they spell stands in a comment before them
            assert f"<!-- {word} -->" in svg


def test_plain_decoding_alone_has_the_plots_that_it_can_have(page: tuple[str, dict[str, Any]]) -> None:
    rows = [row for row in page[1]["rows"] if row["drafter"] == "none"]
    assert [plot.title for plot in draw(rows)] == ["Where a round's time goes", "Time per token along the context"]
    assert draw([row | {"round_ms": None, "stages": {}, "ms_along_context": []} for row in rows]) == []


def test_runs_that_ended_with_their_first_span_have_no_rate_beside_their_bar(page: tuple[str, dict[str, Any]]) -> None:
    rows = page[1]["rows"]
    without = [row | {"tokens_per_second": None, "decode_speedup": None} for row in rows]
    found = [next(p.svg for p in draw(r) if p.title.startswith("Where")) for r in (rows, without)]
    assert ["ms a token" in svg for svg in found] == [True, False]
    assert "Speed against tree size" not in [plot.title for plot in draw(without)]


def test_synthetic_figures_are_marked_and_text_is_escaped(page: tuple[str, dict[str, Any]]) -> None:
    report = json.loads(json.dumps(page[1]))
    report["plan"] = "a<b"
    report["rows"][1] |= {"synthetic_accept": 2, "same_tokens": None}
    html = render(report, "python & co")
    assert "Synthetic: drafts were accepted to a length by force" in html
    assert "ngram synthetic:2" in html
    assert "a&lt;b" in html
    assert "python &amp; co" in html
    assert "<!-- ngram synthetic:2 6 nodes -->" in plots_of(html)["Acceptance by depth"]


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(
    toy_plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "taken").write_text("x")
    assert bench.main(["latency", str(toy_plan), "--report", str(tmp_path / "taken")]) == 2
    error = capsys.readouterr().err
    assert "cannot be written" in error
    assert "choose another folder for --report" in error
    assert "measuring" not in error
