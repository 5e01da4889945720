"""All studies at a tiny size: reports, plots, interruption, progress, options and documentation."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from superbatch.errors import InputError
from superbatch.lab import plot
from superbatch.lab.report.json import to_json
from superbatch.lab.report.study import Quantity, Study, StudyArm, StudyRun
from superbatch.lab.report.study_text import equivalence_table, study_table
from superbatch.lab.studies.catalogue import DOCUMENTATION, STUDIES
from superbatch.lab.studies.shared_options import Interrupted, Progress
from superbatch.lab.studies.study import Options, study
from superbatch.lab.studies.study_common import equivalence_test
from tests.report_json import from_json
from tests.studies import own_recipe
from tests.studies.planted import METRIC

PLANE = f"{own_recipe.__file__}:plane"


def test_study_splits_equals_compare() -> None:
    report = study("splits", own_recipe.plane(), Options(runs=2, samples=200))
    assert [arm.name for arm in report.arms][:2] == ["1x20", "5x4"]
    assert report.arms[0].facts == {"updates": 10}
    apart = [arm.mean("weights differ by") for arm in report.arms]
    assert apart[0] is None
    assert all(each is not None and each < 1e-3 for each in apart[1:])
    assert report.conclusion.startswith("Every split trains like the real batch: weights within")
    assert [test.result.test for test in report.tests] == ["paired"] * (len(report.arms) - 1)


def test_study_survey_equals_survey() -> None:
    report = study("survey", "digits", Options(runs=3, batch_size=200))
    assert [arm.name for arm in report.arms] == ["1x200", "1x200 again", "10x20", "20x10"]
    for arm in report.arms[2:]:
        apart = arm.facts["pairs differ by"]
        assert 0 < apart < 1e-5
    assert {test.second for test in report.tests} == {"1x200"}
    # Margin and difference are factors: 0.15 decades.
    assert {round(test.margin, 6) for test in report.tests} == {round(10**0.15, 6)}
    first, second = (report.arms[i].values("suggested lr") for i in (0, 1))
    expected = math.prod(b / a for a, b in zip(first, second, strict=True)) ** (1 / 3)
    assert report.tests[0].difference == pytest.approx(expected)
    assert {len(run.curve) for arm in report.arms for run in arm.runs} == {100}
    assert report.conclusion.startswith("10x20 and 20x10 survey like the real batch")


def test_reports_survive_a_json_round_trip(momentum: Study, grown: Study, precision: Study) -> None:
    from superbatch.lab import plot

    for report in (momentum, grown, precision):
        assert to_json(from_json(Study, to_json(report))) == to_json(report)
        table = study_table(report)
        assert len(table.rows) == len(report.arms)
        assert {len(row) for row in table.rows} == {1 + len(report.quantities)}
        assert len(equivalence_table(report.tests).rows) == len(report.tests)
        assert report.conclusion.endswith(".") and ". " not in report.conclusion, "one sentence"
        figure = plot.study(report, dark=report is momentum)
        assert plot.png(figure, dots_per_inch=30).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", STUDIES)
def test_an_interruption_before_the_first_run_gives_a_plot(name: str, momentum: Study) -> None:
    from superbatch.lab import plot
    from superbatch.lab.report.page import render
    from superbatch.lab.report.pages import page_of

    nothing = tuple(StudyArm(name=f"batch {k}", how="", facts={}, runs=()) for k in (1, 2))
    report = replace(momentum, name=name, arms=nothing, tests=(), curve_at=(1.0, 2.0), partial=True)
    picture = plot.png(plot.study(report), dots_per_inch=30)
    assert "interrupted before the last run" in render(page_of(report), light=picture, dark=picture)


def test_seeds_in_several_processes_give_the_same_report() -> None:
    options = {"runs": 2, "samples": 300, "learning_rate": 0.05}
    here = study("grow-batch", PLANE, Options(**options))  # pyright: ignore[reportArgumentType]  (by name)
    spread = study("grow-batch", PLANE, Options(**options, workers=2))  # pyright: ignore[reportArgumentType]
    assert spread.arms == here.arms
    assert spread.conclusion == here.conclusion


@pytest.mark.parametrize("name", ["momentum", "splits"])
def test_an_interruption_keeps_the_finished_runs(name: str) -> None:
    def stop(event: Progress) -> None:
        if event.finished is not None and event.finished[0] == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        study(name, own_recipe.plane(), Options(runs=3, samples=256), progress=stop)
    report = caught.value.report
    assert report.partial
    assert {run.seed for run in report.arms[0].runs} == {0, 1}
    assert {run.seed for run in report.arms[-1].runs} == {0}
    assert from_json(Study, to_json(report)) == report


def test_progress_ends_at_100_percent() -> None:
    for name in ("momentum", "grow-batch", "critical-batch"):
        events: list[Progress] = []
        study(name, own_recipe.plane(), Options(runs=2, samples=32, batch_size=2), progress=events.append)
        assert events[-1].done == events[-1].total
        assert [event.done for event in events] == sorted(event.done for event in events)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", {}, "There is no study 'nonsense'.*Use one of momentum, grow-batch"),
        (
            "precision",
            {"margin": 0.5},
            "'precision' does not use margin=0.5. Leave it out; this study takes runs",
        ),
        ("momentum", {"tolerance": 0.1}, "this study takes samples, batch_size, learning_rate, margin"),
        ("momentum", {"runs": 0}, "runs=0 is not a positive integer"),
        ("momentum", {"learning_rate": -1.0}, "learning_rate=-1.0 is not positive. Give a number above 0"),
        ("critical-batch", {"optimizer": "lion"}, "optimizer='lion'.*does not offer it.*sgd, adam"),
        ("grow-batch", {"batch_size": 200}, "batch_size=200 with 240 training samples"),
        ("momentum", {"workers": 2}, "workers=2 with a Recipe object"),
        ("momentum", {"samples": 200}, "samples=200 with batch_size=16.*at least 16 batches"),
        ("momentum", {"batch_size": 1}, "batch_size=1.*more than one sample"),
        ("critical-batch", {"samples": 100, "batch_size": 8}, "makes no update.*at least 128 samples"),
    ],
)
def test_wrong_options(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study(name, own_recipe.plane(), Options(**options))  # pyright: ignore[reportArgumentType]  (by name)


@pytest.mark.parametrize("name", ["grow-batch", "critical-batch"])
def test_a_diverging_training_is_reported(name: str) -> None:
    with pytest.raises(InputError, match=r"lr 50 diverges.*--lr"):
        study(name, own_recipe.plane(), Options(runs=1, samples=900, learning_rate=50.0))


@pytest.mark.parametrize("name", ["momentum", "grow-batch", "critical-batch"])
def test_coupled_samples_are_refused(name: str) -> None:
    with pytest.raises(
        InputError, match=f"The study '{name}' cannot use the recipe 'digits-bn'.*another objective"
    ):
        study(name, "digits-bn", Options(quick=True))


def test_every_study_has_a_question_a_plot_and_a_section_of_the_docs() -> None:
    from superbatch.lab.plot.studies import _DRAWINGS

    assert set(STUDIES) == set(_DRAWINGS)
    assert all(entry.question.endswith("?") for entry in STUDIES.values())
    root = Path(__file__).resolve().parents[2]
    (address,) = re.findall('^Documentation = "(.*)"', (root / "pyproject.toml").read_text("utf8"), re.M)
    assert f"{address}studies/" == DOCUMENTATION
    headings = re.findall("^## (.*)", (root / "docs/studies.md").read_text("utf8"), re.M)
    slugs = [re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings]
    assert [entry.section for entry in STUDIES.values()] == slugs[: len(STUDIES)], "in the order of the page"


def test_a_report_links_to_its_explanation(momentum: Study, grown: Study, precision: Study) -> None:
    for report in (
        momentum,
        grown,
        precision,
        study("splits", own_recipe.plane(), Options(runs=2, samples=40)),
    ):
        assert report.notes[-1].endswith(f"{DOCUMENTATION}#{STUDIES[report.name].section}")
    for report in (momentum, grown, precision):
        assert report.notes[0].startswith("It does not show "), "the report states its limit"


def test_the_plot_shows_every_run_of_the_reference() -> None:
    arms = tuple(
        StudyArm(
            name=name,
            how="",
            facts={},
            runs=tuple(StudyRun(seed=seed, values={METRIC: value}) for seed, value in enumerate(values)),
        )
        for name, values in (("1x20", (82.0, 84.0)), ("4x5", (82.0, 84.0)))
    )
    report = replace(
        study("splits", own_recipe.plane(), Options(runs=2, samples=100)),
        arms=arms,
        quantities=(Quantity(name=METRIC, meaning="", form=".2f"),),
        tests=tuple(
            test for test in (equivalence_test(arms[1], arms[0], METRIC, margin=0.05),) if test is not None
        ),
    )
    low, high = plot.study(report).axes[0].get_xlim()
    assert low < 82.0 < 84.0 < high
