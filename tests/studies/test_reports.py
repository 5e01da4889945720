"""Reports: JSON round trip, tables, sentences and plot."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace

import pytest

from superbatch.errors import InputError
from superbatch.lab import plot
from superbatch.lab.report.comparison import Comparison
from superbatch.lab.report.json import to_json
from superbatch.lab.report.page import Page, render
from superbatch.lab.report.pages import page_of
from superbatch.lab.report.table import (
    Column,
    Table,
    comparison_table,
    difference_text,
    plain,
)
from superbatch.lab.report.verdict import verdict
from superbatch.lab.studies.compare import Options, compare
from superbatch.results.update import Update
from tests.report_json import from_json
from tests.studies import own_recipe


@pytest.fixture(scope="module")
def report() -> Comparison:
    return compare(own_recipe.plane(), Options(updates=6, runs=3, include_wrong=True))


@pytest.fixture(scope="module")
def partial(report: Comparison) -> Comparison:
    """Report interrupted when the first two arms had one run each and the others none."""
    arms = [replace(arm, runs=(), mean=None, sd=None, paired=None, welch=None) for arm in report.arms]
    arms = [replace(arm, weight_difference=None, median_difference=None, seconds=None) for arm in arms]
    arms[0] = replace(report.arms[0], runs=report.arms[0].runs[:1], sd=None)
    arms[1] = replace(report.arms[1], runs=report.arms[1].runs[:1], sd=None, paired=None, welch=None)
    return replace(report, arms=tuple(arms), partial=True)


def test_json_round_trip(report: Comparison, partial: Comparison) -> None:
    for each in (report, partial):
        again = from_json(Comparison, to_json(each))
        assert again == each
        assert type(again.arms) is tuple
        assert type(again.arms[1].runs[0].losses) is tuple
        assert dataclasses.is_dataclass(again.arms[1].runs[0])


def test_json_keeps_nonfinite_numbers() -> None:
    update = Update(
        loss=math.inf,
        grad_norm=-math.inf,
        weight=2.5,
        samples=None,
        microbatches=1,
        learning_rates=(math.nan, 1),
    )
    text = to_json(update)
    again = from_json(Update, text)
    assert (again.loss, again.grad_norm, again.weight) == (math.inf, -math.inf, 2.5)
    assert math.isnan(again.learning_rates[0])
    assert '"loss": "Infinity"' in text


def test_json_keeps_an_int_an_int() -> None:
    update = Update(loss=1.0, grad_norm=None, weight=3, samples=3, microbatches=1, learning_rates=())
    assert type(from_json(Update, to_json(update)).weight) is int


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("dtype"),
        lambda content: content.update(colour="red"),
        lambda content: content.update(updates=True),
        lambda content: content["arms"][0].update(claim="best"),
        lambda content: content["arms"][1]["runs"][0].update(losses=[None]),
    ],
)
def test_a_lost_or_changed_field_is_found(report: Comparison, change) -> None:
    content = json.loads(to_json(report))
    change(content)
    with pytest.raises(AssertionError):
        from_json(Comparison, json.dumps(content))


@pytest.mark.parametrize("thing", [3, {"a": 1}, Update])
def test_only_reports_are_written(thing: object) -> None:
    with pytest.raises(InputError, match=r"is no report\. Pass the result of a command or a study"):
        to_json(thing)


def test_the_table_has_a_row_per_arm_and_explains_its_columns(report: Comparison) -> None:
    table = comparison_table(report)
    assert len(table.rows) == len(report.arms)
    assert all(len(row) == len(table.columns) == 7 for row in table.rows)
    assert all(column.meaning for column in table.columns)
    lines = plain(table).splitlines()
    assert len(lines) == 3 + len(report.arms)
    assert lines[1].index("updates") == lines[3].index("6", lines[1].index("updates") - 1)
    (details,) = page_of(report).details
    assert len(details.rows) == 2 * (len(report.arms) - 1)
    assert details.rows[1][0] == f"{report.arms[1].name} – 1x20, welch"


def test_a_partial_report_says_so(partial: Comparison) -> None:
    table = comparison_table(partial)
    assert "1 of 3 runs" in table.title
    assert table.rows[2][1:] == ("–", "6", "–", table.rows[2][4], "–", "–")
    assert "needs at least 3 runs" in verdict(partial)[0]


def test_sentences(report: Comparison) -> None:
    right, wrong = verdict(report)
    assert right.startswith("Every split trains like the real batch: weights within")
    assert wrong.startswith("The weights of the methods that are wrong on purpose differ by ")

    def said(**changed: object) -> str:
        arms = [replace(arm, paired=arm.paired and replace(arm.paired, **changed)) for arm in report.arms]
        return verdict(replace(report, arms=tuple(arms)))[0]

    assert said(identical=True).endswith(", squared error identical.")
    assert ", squared error equivalent within ±0.2" in said(identical=False, equivalent=True)
    assert "NOT shown to be equivalent" in said(identical=False, equivalent=False)
    assert said(identical=False, runs=2).endswith("needs at least 3 runs for a test of equivalence.")


@pytest.mark.parametrize(("value", "text"), [(math.inf, "inf"), (2.0, "2e+02 %"), (9e-5, "9.0e-05")])
def test_differences(value: float, text: str) -> None:
    assert difference_text(value) == text


@pytest.mark.parametrize("dark", [False, True])
def test_the_plot_shows_every_arm(report: Comparison, partial: Comparison, dark: bool) -> None:
    figure = plot.comparison(report, dark=dark)
    curves, metric, weights = figure.axes
    assert [line.get_label() for line in curves.get_lines()] == [
        "1x20 (real batch)",
        *(arm.name for arm in report.arms[1:]),
    ]
    assert len(metric.get_yticks()) == len(weights.get_yticks()) == len(report.arms)
    for axes in (curves, metric, weights):
        assert axes.get_xlabel()
        assert axes.get_title()
    assert plot.png(figure, dots_per_inch=40).startswith(b"\x89PNG")
    assert plot.png(plot.comparison(partial, dark=dark), dots_per_inch=40).startswith(b"\x89PNG")


def test_the_plot_of_no_or_nonfinite_values(report: Comparison, partial: Comparison) -> None:
    nothing = replace(partial, arms=tuple(replace(arm, runs=(), mean=None) for arm in partial.arms))
    assert plot.png(plot.comparison(nothing), dots_per_inch=40).startswith(b"\x89PNG")
    lost = replace(
        report.arms[1].runs[0], losses=(math.nan,) * 6, metric=math.nan, weight_difference=math.inf
    )
    arm = replace(report.arms[1], runs=(lost,), mean=math.nan, sd=math.nan, weight_difference=math.inf)
    figure = plot.comparison(replace(report, arms=(report.arms[0], arm)))
    assert plot.png(figure, dots_per_inch=40).startswith(b"\x89PNG")


def test_the_plot_does_not_change_settings_of_matplotlib(report: Comparison) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    plot.png(plot.comparison(report), dots_per_inch=40)
    assert dict(mpl.rcParams) == before


def test_a_page_escapes_texts_and_omits_empty_sections() -> None:
    bad = '<b title="x">&</b>'
    column = Column(bad, bad)
    page = Page(
        title=bad,
        lead=bad,
        partial=True,
        verdict=[bad],
        findings=[bad],
        tables=[Table(bad, (column, column), ((bad, bad),)), Table("without rows", (column,), ())],
        details=[Table("beside the plot", (column,), (("1",),))],
        plotted=bad,
        code=bad,
        notes=[bad],
        arms=[(bad, bad)],
        settings={"Options": {bad: bad}, "Versions": {}},
    )
    text = render(page, light=b"light", dark=b"dark")
    assert text.count("&lt;b title=&#34;x&#34;&gt;&amp;&lt;/b&gt;") > 15, "the premise: it occurs everywhere"
    assert "<b" not in text.replace("<body>", "")
    assert "without rows" not in text
    assert "Versions" not in text
    assert text.index("data:image/png") < text.index("beside the plot"), "the plot comes first"
    empty = render(Page(title="a"))
    body = set(re.findall(r"<(\w+)", empty.split("<body>")[1]))
    assert body == {"h1"}
    assert empty.endswith("</html>\n")
