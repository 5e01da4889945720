"""HTML pages of the reports; those of `compare` and `study` are in `html`."""

from __future__ import annotations

# pyright: strict
from collections.abc import Mapping, Sequence
from html import escape

from superbatch.results.advice import Advice
from superbatch.results.caffe import CaffeExplained
from superbatch.results.verification import Verification

from . import advice_text, caffe_text, fitting_text, noise_study, survey_text
from .fitting import Fitting
from .noise_study import NoiseStudy
from .page import document, pairs, partial_mark, picture, table, terms
from .surveys import Surveys
from .table import Column, Table


def fitting_page(report: Fitting, *, light: bytes, dark: bytes) -> str:
    """Write a fit as an HTML page."""
    tables = (
        fitting_text.sizes_table(report),
        fitting_text.reach_table(report),
        fitting_text.savings_table(report),
    )
    plot = picture(light, dark, what="Peak memory and time per sample by size of the micro-batch.")
    return _measured("fit", report, fitting_text.findings(report), tables, plot)


def noise_page(report: NoiseStudy, *, light: bytes, dark: bytes) -> str:
    """Write a noise study as an HTML page."""
    tables = (noise_study.points_table(report), noise_study.steps_table(report))
    plot = picture(
        light, dark, what="The noise scale over the training; the time by number of micro-batches."
    )
    return _measured("noise", report, noise_study.findings(report), tables, plot)


def surveys_page(report: Surveys, *, light: bytes, dark: bytes) -> str:
    """Write a study of surveys as an HTML page."""
    tables = (survey_text.surveys_table(report),)
    plot = picture(light, dark, what="Loss over the surveyed value; what each survey suggests.")
    said = [survey_text.suggestion(report), *survey_text.conclusions(report)]
    arms = ["<h2>The arms</h2>", terms((arm.name, arm.how) for arm in report.arms)]
    return _measured("survey", report, said, tables, plot, arms)


def advice_page(report: Advice, *, light: bytes, dark: bytes) -> str:
    """Write an advice as an HTML page with every finding."""
    tables = (
        advice_text.steps_table(report),
        advice_text.models_table(report),
        advice_text.alternative_table(report),
    )
    plot = picture(light, dark, what="Time to the same loss by number of micro-batches.")
    body = [_mark(partial=report.partial), *_said(advice_text.findings(report)), *_tables(tables)]
    body += ["<h2>Plot</h2>", plot, *_columns(tables), _run(report.command, report.versions)]
    return _page(f"superbatch advise: {report.verdict}", body)


def caffe_page(report: CaffeExplained, *, light: bytes, dark: bytes) -> str:
    """Write an explained solver file as an HTML page."""
    tables = (caffe_text.settings_table(report),)
    plot = picture(light, dark, what="The learning rate over the updates.")
    body = [*_tables(tables), "<h2>Pitfalls</h2>"]
    body += [f"<p>{escape(each)}</p>" for each in caffe_text.findings(report)]
    body += ["<h2>Plot</h2>", plot, "<h2>train.py</h2>", f"<pre>{escape(report.code)}</pre>"]
    body += [_run(report.command, report.versions)]
    return _page(f"superbatch caffe: {report.source}", body)


def verification_page(report: Verification, *, recipe: str, command: Mapping[str, str]) -> str:
    """Write a verification as an HTML page."""
    body = [*_said([line.strip() for line in report.lines()]), *_tables((differences_table(report),))]
    body += [_run(command, {})]
    return _page(f"superbatch verify: {recipe}", body)


def differences_table(report: Verification) -> Table:
    """The relative difference of each gradient, one column for each dtype."""
    header, rows = report.rows()
    columns = tuple(Column(heading, "relative difference of the gradient") for heading in header)
    return Table("relative difference of each gradient", columns, tuple(rows))


def _measured(
    command: str,
    report: Fitting | NoiseStudy | Surveys,
    said: Sequence[str],
    tables: Sequence[Table],
    plot: str,
    more: Sequence[str] = (),
) -> str:
    """Page of a command that trains a recipe."""
    body = [f'<p class="quiet">{escape(report.description)}.</p>', _mark(partial=report.partial)]
    body += [*_said(said), *_tables(tables), "<h2>Plot</h2>", plot, *_columns(tables), *more]
    return _page(f"superbatch {command}: {report.recipe}", [*body, _run(report.command, report.versions)])


def _page(title: str, body: Sequence[str]) -> str:
    return document(title, [f"<h1>{escape(title)}</h1>", *body])


def _mark(*, partial: bool) -> str:
    return partial_mark() if partial else ""


def _said(sentences: Sequence[str]) -> list[str]:
    """Sentences, of which the first is the verdict."""
    first, *others = sentences
    return [f'<p class="verdict">{escape(first)}</p>', *(f"<p>{escape(each)}</p>" for each in others)]


def _tables(tables: Sequence[Table]) -> list[str]:
    return [f"<h2>{escape(each.title)}</h2>{table(each)}" for each in tables if each.rows]


def _columns(tables: Sequence[Table]) -> list[str]:
    meanings = {
        column.heading: column.meaning
        for each in tables
        if each.rows
        for column in each.columns
        if column.meaning
    }
    return ["<h2>How to read this</h2>", terms(meanings.items())]


def _run(command: Mapping[str, str], versions: Mapping[str, str]) -> str:
    asked = pairs("Options", command) + pairs("Versions", versions)
    return f'<h2>Command and versions</h2><div class="columns">{asked}</div>' if asked else ""
