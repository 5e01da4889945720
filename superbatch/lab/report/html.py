"""A comparison or a study as one self-contained page: no script, no request to anywhere, light and dark."""

from __future__ import annotations

# pyright: strict
import base64
from collections.abc import Iterable, Mapping
from html import escape

from .comparison import Comparison
from .study import Study
from .study_text import equivalence_table, study_table
from .study_text import title_of as title_of_study
from .table import Table, comparison_table, margin_text, rows_with_details, title_of
from .verdict import verdict

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1a1a1a; --quiet: #555b66; --line: #d9dce1; --accent: #0072b2; --stripe: #f5f6f8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181d; --ink: #e8e8e8; --quiet: #a5acb8; --line: #363b45; --accent: #56b4e9; --stripe: #1d2026;
  }
}
body {
  margin: 0 auto; max-width: 68rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.quiet { color: var(--quiet); margin: 0 0 1rem; }
.verdict { border-left: 4px solid var(--accent); padding: .1rem 1rem; }
.partial { border: 2px solid #d55e00; border-radius: 6px; padding: .5rem 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  text-align: left; vertical-align: top; padding: .4rem .8rem .4rem .4rem;
  border-bottom: 1px solid var(--line);
}
.wide td { white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); font-size: .9rem; }
tbody tr:nth-child(even) { background: var(--stripe); }
tbody th { font-weight: 600; white-space: nowrap; }
img { max-width: 100%; height: auto; display: block; }
dt { font-weight: 600; }
dd { margin: 0 0 .5rem 0; color: var(--quiet); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 0 2rem; }
.columns table { align-self: start; }
"""

_COMPARED = (
    "Training loss over updates; the metric of each arm with its margin; the differences of the weights."
)


def comparison_page(report: Comparison, *, light: bytes, dark: bytes) -> str:
    """Write a comparison as an HTML page.

    Args:
        report: of a comparison, whole or partial.
        light: PNG of the plot on a light ground.
        dark: PNG of the plot on a dark ground.

    Returns:
        HTML with everything inside it.
    """
    title = f"superbatch compare: {report.recipe}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(report.description)}. {escape(title_of(report))}.</p>',
        _partial(report),
        *(f'<p class="verdict">{escape(sentence)}</p>' for sentence in verdict(report)),
        _table(comparison_table(report)),
        "<h2>Plot</h2>",
        _picture(light, dark, what=_COMPARED),
        "<h2>Equivalence tests</h2>",
        _tests(report),
        "<h2>How to read this</h2>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        _terms((column.heading, column.meaning) for column in comparison_table(report).columns),
        "<h2>How each arm makes its update</h2>",
        _terms((arm.name, f"{arm.how}; micro-batches of {_sizes(arm.sizes)} samples") for arm in report.arms),
        "<h2>What was run</h2>",
        f'<div class="columns">{_pairs("Setting", _setting(report))}{_pairs("Asked for", report.command)}'
        f"{_pairs('Versions', report.versions)}</div>",
    ]
    return _page(title, body)


def study_page(report: Study, *, light: bytes, dark: bytes) -> str:
    """Write a study as an HTML page.

    Args:
        report: of a study, whole or partial.
        light: PNG of the plot on a light ground.
        dark: PNG of the plot on a dark ground.

    Returns:
        HTML with everything inside it.
    """
    tests = equivalence_table(report)
    partial = '<p class="partial"><strong>Partial:</strong> interrupted before the last run.</p>'
    body = [
        f"<h1>{escape(report.question)}</h1>",
        f'<p class="quiet">{escape(title_of_study(report))}: {escape(report.description)}.</p>',
        partial if report.partial else "",
        f'<p class="verdict">{escape(report.conclusion)}</p>',
        _table(study_table(report)),
        "<h2>Plot</h2>",
        _picture(light, dark, what="The quantities of the table."),
        *(("<h2>Tests</h2>", _table(tests)) if tests.rows else ()),
        "<h2>How to read this</h2>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        _terms((each.name, each.meaning) for each in report.quantities),
        "<h2>The arms</h2>",
        _terms((arm.name, arm.how) for arm in report.arms),
        "<h2>What was run</h2>",
        f'<div class="columns">{_pairs("Setting", report.setting)}{_pairs("Asked for", report.command)}'
        f"{_pairs('Versions', report.versions)}</div>",
    ]
    return _page(f"superbatch study {report.name}", body)


def _page(title: str, body: Iterable[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(filter(None, body)) + "\n</body>\n</html>\n"
    )


def _partial(report: Comparison) -> str:
    if not report.partial:
        return ""
    done, asked = sum(len(arm.runs) for arm in report.arms), len(report.arms) * len(report.seeds)
    return f'<p class="partial"><strong>Partial:</strong> interrupted after {done} of {asked} runs.</p>'


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col" title="{escape(column.meaning)}">{escape(column.heading)}</th>'
        for column in table.columns
    )
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    body = f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="wide"><table>\n{body}\n</table></div>'


def _tests(report: Comparison) -> str:
    table = rows_with_details(report)
    return (
        _table(table) if table.rows else "<p>There are fewer than two runs per arm: no test can be made.</p>"
    )


def _picture(light: bytes, dark: bytes, *, what: str) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">'
        f'<img alt="{what}" src="{_data(light)}"></picture>'
    )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _terms(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "\n".join(f"<dt>{escape(t)}</dt><dd>{escape(m)}</dd>" for t, m in pairs) + "</dl>"


def _pairs(heading: str, values: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><code>{escape(value)}</code></td></tr>'
        for name, value in values.items()
    )
    return f"<table><thead><tr><th colspan=2>{escape(heading)}</th></tr></thead><tbody>{rows}</tbody></table>"


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
