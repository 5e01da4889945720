"""Pages of the reports: title, tables and sentences of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from superbatch.results.advice import Advice
from superbatch.results.caffe import CaffeExplained
from superbatch.results.verification import Verification

from . import advice_text, caffe_text, fitting_text, noise_study, study_text, survey_text
from .comparison import Comparison
from .fitting import Fitting
from .noise_study import NoiseStudy
from .page import Page
from .run import RunReport
from .study import Study, StudyTest
from .surveys import Surveys
from .table import Column, Table, comparison_table, margin_text
from .verdict import verdict

Report = Comparison | Fitting | NoiseStudy | Surveys | Study | Advice | CaffeExplained


def page_of(report: Report) -> Page:
    """Return the page of a report, complete or partial."""
    match report:
        case Comparison():
            page = _comparison(report)
        case Study():
            page = _study(report)
        case Advice():
            page = _advice(report)
        case CaffeExplained():
            page = Page(
                title=f"superbatch caffe: {report.source}",
                guide="caffe",
                tables=[caffe_text.settings_table(report)],
                findings=caffe_text.findings(report),
                plotted="The learning rate during the training.",
                code=report.code,
            )
        case Fitting():
            plotted = "Peak memory and time per sample by size of the micro-batch."
            page = _of_recipe(report, "fit", fitting_text.findings(report), plotted, guide="memory")
            page = replace(page, tables=fitting_text.tables(report))
        case NoiseStudy():
            plotted = "The noise scale during the training; the time by number of micro-batches."
            page = _of_recipe(report, "noise", noise_study.findings(report), plotted)
            page = replace(page, tables=[noise_study.points_table(report), noise_study.steps_table(report)])
        case Surveys():
            sentences = [survey_text.suggestion(report), *survey_text.conclusions(report)]
            plotted = "The loss against the surveyed value; the value that each survey suggests."
            page = _of_recipe(report, "survey", sentences, plotted)
            page = replace(page, tables=[survey_text.surveys_table(report)], arms=_arms(report))
    run = {"Options": report.command, "Versions": report.versions}
    return replace(page, partial=report.partial, settings={**page.settings, **run})


def verification_page(report: Verification, *, recipe: str, command: Mapping[str, str]) -> Page:
    """Return the page of a verification."""
    first, *others = [line.strip() for line in report.lines()]
    return Page(
        title=f"superbatch verify: {recipe}",
        guide="testing",
        verdict=[first],
        findings=others,
        tables=[differences_table(report)],
        settings={"Options": command},
    )


def differences_table(report: Verification) -> Table:
    """Return the relative difference of each gradient, with one column for each dtype."""
    header, rows = report.rows()
    columns = tuple(Column(heading, "relative difference of the gradient") for heading in header)
    return Table("relative difference of each gradient", columns, tuple(rows))


def _of_recipe(
    report: RunReport, command: str, sentences: Sequence[str], plotted: str, *, guide: str | None = None
) -> Page:
    """Return the page of a command that ran a recipe; the first sentence is the verdict."""
    return Page(
        title=f"superbatch {command}: {report.recipe}",
        guide=guide or command,
        lead=report.description,
        verdict=sentences[:1],
        findings=sentences[1:],
        plotted=plotted,
    )


def _comparison(report: Comparison) -> Page:
    plotted = "Training loss; metric of each arm with its margin; differences of the weights."
    tail = "none" if report.tail is None else f"{report.tail} samples at the end of each epoch"
    return replace(
        _of_recipe(report, "compare", verdict(report), plotted),
        tables=[comparison_table(report)],
        details=[study_text.equivalence_table(_tests(report))],
        notes=report.notes,
        arms=_arms(report),
        settings={
            "Setting": {
                "backend": report.backend,
                "loss": report.statement,
                "tail": tail,
                "seeds": ", ".join(map(str, report.seeds)),
                "margin": margin_text(report),
                "wall time": f"{report.seconds:.1f} s",
            }
        },
    )


def _tests(report: Comparison) -> list[StudyTest]:
    """Return the tests of each arm: on pairs of runs, and as if the seeds were independent."""
    return [
        StudyTest(
            first=arm.name,
            second=f"{report.arms[0].name}, {test.test}",
            quantity=report.metric,
            ratio=False,
            result=test,
        )
        for arm in report.arms
        for test in (arm.paired, arm.welch)
        if test is not None
    ]


def _study(report: Study) -> Page:
    return Page(
        title=report.question,
        guide="studies",
        lead=f"superbatch study {report.name}, {report.recipe}: {report.description}",
        verdict=[report.conclusion],
        tables=[study_text.study_table(report), study_text.equivalence_table(report.tests)],
        plotted="The quantities of the table.",
        notes=report.notes,
        arms=_arms(report),
        settings={"Setting": report.setting},
    )


def _advice(report: Advice) -> Page:
    first, *others = advice_text.answer(report)
    return Page(
        title=f"superbatch advise: {report.verdict}",
        guide="advice",
        verdict=[first],
        findings=others,
        caveats=advice_text.caveats(report),
        tables=advice_text.tables(report),
        details=[advice_text.memory_table(report)],
        plotted="The time to the same loss by number of micro-batches.",
    )


def _arms(report: Any) -> list[tuple[str, str]]:
    return [(arm.name, arm.how) for arm in report.arms]
