"""Parts of a self-contained HTML page: no scripts, no requests, light and dark mode."""

from __future__ import annotations

# pyright: strict
import base64
from collections.abc import Iterable, Mapping
from html import escape

from .table import Table

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
pre { overflow-x: auto; background: var(--stripe); padding: .8rem; font-size: .85rem; }
"""


def document(title: str, body: Iterable[str]) -> str:
    """An HTML document."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(filter(None, body)) + "\n</body>\n</html>\n"
    )


def partial_mark(text: str = "interrupted before the end.") -> str:
    """A box that marks a report as partial."""
    return f'<p class="partial"><strong>Partial:</strong> {escape(text)}</p>'


def table(content: Table) -> str:
    """An HTML table; the tooltip of a heading explains its column."""
    heads = "".join(
        f'<th scope="col" title="{escape(column.meaning)}">{escape(column.heading)}</th>'
        for column in content.columns
    )
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in content.rows
    )
    body = f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="wide"><table>\n{body}\n</table></div>'


def picture(light: bytes, dark: bytes, *, what: str) -> str:
    """A plot that follows the light or dark mode of the browser."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">'
        f'<img alt="{escape(what)}" src="{_data(light)}"></picture>'
    )


def terms(pairs: Iterable[tuple[str, str]]) -> str:
    """A definition list."""
    return "<dl>" + "\n".join(f"<dt>{escape(t)}</dt><dd>{escape(m)}</dd>" for t, m in pairs) + "</dl>"


def pairs(heading: str, values: Mapping[str, str]) -> str:
    """A table of names and values, or an empty string if there are none."""
    if not values:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><code>{escape(value)}</code></td></tr>'
        for name, value in values.items()
    )
    return f"<table><thead><tr><th colspan=2>{escape(heading)}</th></tr></thead><tbody>{rows}</tbody></table>"


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
