"""A report for readers: what stands on its HTML page, and above and below its tables on a terminal."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .table import Table

DOCUMENTATION = "https://superbatch.github.io/superbatch/"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of a page, as plain text: the template escapes it."""

    title: str
    guide: str = ""  # page of the documentation that explains it, without .md
    lead: str = ""  # one quiet line below the title, without its full stop
    partial: bool = False  # the study was interrupted
    verdict: Sequence[str] = ()  # set apart from the other sentences
    findings: Sequence[str] = ()
    tables: Sequence[Table] = ()  # those without rows are left out
    details: Sequence[Table] = ()  # on the page only
    plotted: str = ""  # alternative text of the plot
    code: str = ""
    notes: Sequence[str] = ()  # on the page only
    arms: Sequence[tuple[str, str]] = ()  # name, and how it makes its update
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])


def render(page: Page, *, light: bytes = b"", dark: bytes = b"") -> str:
    """Write a page with everything inside it: the plot is a PNG on a light and one on a dark ground.

    Examples:
        >>> "<h1>a &amp; b</h1>" in render(Page(title="a & b"))
        True
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("superbatch.lab.report")
    # Recipes, and so texts of reports, are the user's: all of it is escaped.
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
        meanings.setdefault(column.heading, column.meaning)  # where two tables share a heading: the first's
    return jinja.get_template("page.html.j2").render(
        page=page,
        documentation=DOCUMENTATION,
        meanings=list(meanings.items()),
        light=base64.b64encode(light).decode("ascii"),
        dark=base64.b64encode(dark).decode("ascii"),
        settings=[(heading, values) for heading, values in page.settings.items() if values],
    )
