"""The content of a report for a reader, and the HTML page made of it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .table import Table

DOCUMENTATION = "https://superbatch.github.io/superbatch/"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of a report as plain text, for the terminal and for the HTML page."""

    title: str
    guide: str = ""  # page of the documentation that explains the report, without .md
    lead: str = ""  # line below the title, without a full stop
    partial: bool = False  # the command was interrupted
    verdict: Sequence[str] = ()  # highlighted on the page
    findings: Sequence[str] = ()
    caveats: Sequence[str] = ()  # limits of the verdict, the most important first
    tables: Sequence[Table] = ()  # a table without rows is not shown
    details: Sequence[Table] = ()  # further tables, on the page only
    plotted: str = ""  # alternative text of the plot
    code: str = ""  # content of train.py
    notes: Sequence[str] = ()  # remarks on the numbers, on the page only
    arms: Sequence[tuple[str, str]] = ()  # name of an arm, and how it makes its update
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])


def render(page: Page, *, light: bytes = b"", dark: bytes = b"") -> str:
    """Return a self-contained HTML page; `light` and `dark` are PNG files of the plot for either background.

    Examples:
        >>> "<h1>a &amp; b</h1>" in render(Page(title="a & b"))
        True
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("superbatch.lab.report")
    # Texts of a report may come from a recipe of the user: everything is escaped.
    jinja = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    shown = [table for table in (*page.tables, *page.details) if table.rows]
    meanings: dict[str, str] = {}
    for column in (column for table in shown for column in table.columns if column.meaning):
        meanings.setdefault(column.heading, column.meaning)  # the first table decides
    return jinja.get_template("page.html.j2").render(
        page=page,
        documentation=DOCUMENTATION,
        meanings=list(meanings.items()),
        light=base64.b64encode(light).decode("ascii"),
        dark=base64.b64encode(dark).decode("ascii"),
        settings=[(heading, values) for heading, values in page.settings.items() if values],
    )
