"""A comparison or a study as one self-contained page: no script, no request to anywhere, light and dark."""

from __future__ import annotations

# pyright: strict
from html import escape

from .comparison import Comparison
from .page import document, pairs, partial_mark, picture, table, terms
from .study import Study
from .study_text import equivalence_table, study_table
from .study_text import title_of as title_of_study
from .table import comparison_table, margin_text, rows_with_details, title_of
from .verdict import verdict

_COMPARED = (
    "Training loss over updates; the metric of each arm with its margin; the differences of the weights."
)


def comparison_page(report: Comparison, *, light: bytes, dark: bytes) -> str:
    """Write a comparison as an HTML page."""
    title = f"superbatch compare: {report.recipe}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(report.description)}. {escape(title_of(report))}.</p>',
        _partial(report),
        *(f'<p class="verdict">{escape(sentence)}</p>' for sentence in verdict(report)),
        table(comparison_table(report)),
        "<h2>Plot</h2>",
        picture(light, dark, what=_COMPARED),
        "<h2>Equivalence tests</h2>",
        _tests(report),
        "<h2>How to read this</h2>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        terms((column.heading, column.meaning) for column in comparison_table(report).columns),
        "<h2>How each arm makes its update</h2>",
        terms((arm.name, f"{arm.how}; micro-batches of {_sizes(arm.sizes)} samples") for arm in report.arms),
        "<h2>Command and versions</h2>",
        f'<div class="columns">{pairs("Setting", _setting(report))}{pairs("Options", report.command)}'
        f"{pairs('Versions', report.versions)}</div>",
    ]
    return document(title, body)


def study_page(report: Study, *, light: bytes, dark: bytes) -> str:
    """Write a study as an HTML page."""
    tests = equivalence_table(report)
    body = [
        f"<h1>{escape(report.question)}</h1>",
        f'<p class="quiet">{escape(title_of_study(report))}: {escape(report.description)}.</p>',
        partial_mark("interrupted before the last run.") if report.partial else "",
        f'<p class="verdict">{escape(report.conclusion)}</p>',
        table(study_table(report)),
        "<h2>Plot</h2>",
        picture(light, dark, what="The quantities of the table."),
        *(("<h2>Tests</h2>", table(tests)) if tests.rows else ()),
        "<h2>How to read this</h2>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        terms((each.name, each.meaning) for each in report.quantities),
        "<h2>The arms</h2>",
        terms((arm.name, arm.how) for arm in report.arms),
        "<h2>Command and versions</h2>",
        f'<div class="columns">{pairs("Setting", report.setting)}{pairs("Options", report.command)}'
        f"{pairs('Versions', report.versions)}</div>",
    ]
    return document(f"superbatch study {report.name}", body)


def _partial(report: Comparison) -> str:
    if not report.partial:
        return ""
    done, asked = sum(len(arm.runs) for arm in report.arms), len(report.arms) * len(report.seeds)
    return partial_mark(f"interrupted after {done} of {asked} runs.")


def _tests(report: Comparison) -> str:
    details = rows_with_details(report)
    if not details.rows:
        return "<p>There are fewer than two runs per arm: no test can be made.</p>"
    return table(details)


def _setting(report: Comparison) -> dict[str, str]:
    return {
        "backend": report.backend,
        "loss": report.statement,
        "optimizer": f"{report.optimizer}, lr {report.learning_rate:g}",
        "dtype": report.dtype,
        "batch": f"{report.batch_size} samples" + ("" if report.tail is None else f", tail {report.tail}"),
        "updates": str(report.updates),
        "seeds": ", ".join(map(str, report.seeds)),
        "margin": margin_text(report),
        "wall time": f"{report.seconds:.1f} s",
    }


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(set(sizes)) == 1:
        return str(sizes[0])
    return ", ".join(map(str, sizes))
