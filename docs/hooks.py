"""What mkdocs does for this site beyond rendering pages.

In a page, `<!-- include: README.md -->` becomes that file of the repository, with its links turned to the
pages of the site; `<!-- exports: superbatch/torch -->` becomes the reference of every name that this package
re-exports; `<!-- modules: superbatch/results/*.py -->` that of every module that matches; and
`<!-- decisions -->` the list of decisions. What is new is listed by itself.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE_OF = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def decisions() -> list[Path]:
    """The decision pages in the order of their numbers."""
    return sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def on_config(config: Any) -> Any:
    """Append the decisions to the navigation; mkdocs takes the titles from the pages."""
    pages = ["decisions/index.md", *(f"decisions/{page.name}" for page in decisions())]
    config.nav.append({"Decisions": pages})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the comments that stand for something."""
    for pattern, replacement in (
        (r"<!-- include: (\S+) -->", _include),
        (r"<!-- exports: (\S+) -->", _exports),
        (r"<!-- modules: (\S+) -->", _modules),
        (r"<!-- decisions -->", _decisions),
    ):
        markdown = re.sub(pattern, replacement, markdown)
    return markdown


def _include(match: re.Match[str]) -> str:
    text = (ROOT / match[1]).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", _link, text)


def _link(match: re.Match[str]) -> str:
    """A link of a file at the root: to a page of the site, elsewhere, or else the name of the file alone."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target:
        return match[0]
    target = target.removeprefix("./")
    page = PAGE_OF.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
    return f"[{text}]({page}{anchor})" if page else f"{text} (`{target}`)"


def _exports(match: re.Match[str]) -> str:
    """Names that a package re-exports in the form `from .module import name as name`."""
    package = match[1].replace("/", ".")
    tree = ast.parse((ROOT / match[1] / "__init__.py").read_text(encoding="utf-8"))
    entries: list[str] = []
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            name = alias.name
            if alias.asname != name or name[0] == "_":
                continue
            # Where a function has the name of its module (`split`), the short path means the module.
            path = f"{package}.{name}.{name}" if node.module == name else f"{package}.{name}"
            entries.append(f"::: {path}\n    options:\n      heading: {package}.{name}")
    return "\n\n".join(entries) or "*Nothing public yet.*"


def _modules(match: re.Match[str]) -> str:
    files = sorted(ROOT.glob(match[1]))
    assert files, f"no module matches {match[1]}"
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem[0] != "_"]
    return "\n\n".join(f"::: {name}" for name in names) or "*Nothing public yet.*"


def _decisions(_: re.Match[str]) -> str:
    titles = ((page.name, page.read_text(encoding="utf-8").splitlines()[0]) for page in decisions())
    return "\n".join(f"* [{title.removeprefix('# ')}]({name})" for name, title in titles)
