"""Pages of the reports: the tables and sentences of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from superbatch.results.advice import Advice
from superbatch.results.caffe import CaffeExplained
from superbatch.results.verification import Verification

from . import advice_text, caffe_text, fitting_text, noise_study, study_text, survey_text
from .comparison import Comparison
from .fitting import Fitting
from .noise_study import NoiseStudy
from .page import Page
from .study import Study, StudyTest
from .surveys import Surveys
from .table import Column, Table, comparison_table, margin_text
from .verdict import verdict

Report = Comparison | Fitting | NoiseStudy | Surveys | Study | Advice | CaffeExplained


def page_of(report: Report) -> Page:
    """The page of a report, whole or partial."""
    match report:
        case Comparison():
            page = _comparison(report)
        case Study():
            page = _study(report)
        case Advice():
            page = _advice(report)
        case CaffeExplained():
            page = _caffe(report)
        case Fitting() | NoiseStudy() | Surveys():
            page = _measured(report)
    run = {"Options": report.command, "Versions": report.versions}
    return replace(page, partial=report.partial, settings={**page.settings, **run})


def verification_page(report: Verification, *, recipe: str, command: Mapping[str, str]) -> Page:
    """The page of a verification."""
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
    """The relative difference of each gradient, one column for each dtype."""
    header, rows = report.rows()
    columns = tuple(Column(heading, "relative difference of the gradient") for heading in header)
    return Table("relative difference of each gradient", columns, tuple(rows))


def _comparison(report: Comparison) -> Page:
    return Page(
        title=f"superbatch compare: {report.recipe}",
        guide="compare",
        lead=report.description,
        verdict=verdict(report),
        tables=[comparison_table(report)],
        details=[study_text.equivalence_table(_tests(report))],
        plotted="Training loss over updates; metric of each arm with its margin; differences of the weights.",
        notes=report.notes,
        arms=[(arm.name, arm.how) for arm in report.arms],
        settings={"Setting": _setting(report)},
    )


def _tests(report: Comparison) -> list[StudyTest]:
    """The tests of each arm: by pairs of runs, and as if the seeds were independent."""
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
        arms=[(arm.name, arm.how) for arm in report.arms],
        settings={"Setting": report.setting},
    )


def _advice(report: Advice) -> Page:
    first, *others = advice_text.answer(report)
    return Page(
        title=f"superbatch advise: {report.verdict}",
        guide="advice",
        verdict=[first],
        findings=[*others, *advice_text.caveats(report, most=None)],
        tables=advice_text.tables(report),
        details=[advice_text.memory_table(report)],
        plotted="Time to the same loss by number of micro-batches.",
    )


def _caffe(report: CaffeExplained) -> Page:
    return Page(
        title=f"superbatch caffe: {report.source}",
        guide="caffe",
        tables=[caffe_text.settings_table(report)],
        findings=caffe_text.findings(report),
        plotted="The learning rate over the updates.",
        code=report.code,
    )


def _measured(report: Fitting | NoiseStudy | Surveys) -> Page:
    """Page of a command that trains a recipe; the first sentence is the verdict."""
    match report:
        case Fitting():
            command, guide, arms = "fit", "memory", ()
            tables = [fitting_text.sizes_table(report), fitting_text.reach_table(report)]
            tables.append(fitting_text.savings_table(report))
            said = fitting_text.findings(report)
            plotted = "Peak memory and time per sample by size of the micro-batch."
        case NoiseStudy():
            command, guide, arms = "noise", "noise", ()
            tables = [noise_study.points_table(report), noise_study.steps_table(report)]
            said = noise_study.findings(report)
            plotted = "The noise scale over the training; the time by number of micro-batches."
        case Surveys():
            command, guide, arms = "survey", "survey", report.arms
            tables = [survey_text.surveys_table(report)]
            said = [survey_text.suggestion(report), *survey_text.conclusions(report)]
            plotted = "Loss over the surveyed value; what each survey suggests."
    return Page(
        title=f"superbatch {command}: {report.recipe}",
        guide=guide,
        lead=report.description,
        verdict=said[:1],
        findings=said[1:],
        tables=tables,
        plotted=plotted,
        arms=[(arm.name, arm.how) for arm in arms],
    )


def _setting(report: Comparison) -> dict[str, str]:
    return {
        "backend": report.backend,
        "loss": report.statement,
        "tail": "none" if report.tail is None else f"{report.tail} samples at the end of each epoch",
        "seeds": ", ".join(map(str, report.seeds)),
        "margin": margin_text(report),
        "wall time": f"{report.seconds:.1f} s",
    }
