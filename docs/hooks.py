"""Hooks of mkdocs that fill in generated parts of the pages.

In a page, `<!-- include: README.md -->` becomes that file of the repository, with links to the pages of the
site; `<!-- exports: superbatch/torch -->` becomes the reference of every name that this package
re-exports (with `first: Accumulator, WholeBatch`, these come first);
`<!-- modules: superbatch/results/*.py -->` the reference of every matching module; `<!-- commands -->` the
reference of the command line; and `<!-- decisions -->` the list of decisions. New names need no edit.
"""

from __future__ import annotations

import ast
import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE_OF = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}


def decisions() -> list[Path]:
    """Return the decision pages in the order of their numbers."""
    return sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def on_config(config: Any) -> Any:
    """Append the decisions to the last section; mkdocs reads the titles from the pages."""
    pages = ["decisions/index.md", *(f"decisions/{page.name}" for page in decisions())]
    (section,) = config.nav[-1].values()
    section.append({"Decisions": pages})
    return config


HISTORY = ("decisions/", "changelog.md")  # the search should find the page on a subject before its history


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the comments listed above; rank pages of history last in the search."""
    if page.file.src_uri.startswith(HISTORY):
        page.meta.setdefault("search", {"boost": 0.2})
    for pattern, replacement in (
        (r"<!-- include: (\S+) -->", _include),
        (r"<!-- exports: (\S+)(?: first: ([\w, ]+))? -->", _exports),
        (r"<!-- modules: (\S+) -->", _modules),
        (r"<!-- commands -->", _commands),
        (r"<!-- decisions -->", _decisions),
    ):
        markdown = re.sub(pattern, replacement, markdown)
    return markdown


def _include(match: re.Match[str]) -> str:
    text = (ROOT / match[1]).read_text(encoding="utf-8")
    link = partial(_link, folder=posixpath.dirname(match[1]))
    return re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", link, text)


def _link(match: re.Match[str], *, folder: str) -> str:
    """Rewrite a link of an included file to a page of the site, or to the file name where there is none."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target:
        return match[0]
    target = posixpath.normpath(posixpath.join(folder, target))
    page = PAGE_OF.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
    return f"[{text}]({page}{anchor})" if page else f"{text} (`{target}`)"


def _exports(match: re.Match[str]) -> str:
    """Return the reference of names that a package re-exports by `from .module import name as name`."""
    package = match[1].replace("/", ".")
    tree = ast.parse((ROOT / match[1] / "__init__.py").read_text(encoding="utf-8"))
    entries: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            name = alias.name
            if alias.asname != name or name[0] == "_":
                continue
            # Where a function has the name of its module (`split`), the short path means the module.
            path = f"{package}.{name}.{name}" if node.module == name else f"{package}.{name}"
            entries[name] = f"::: {path}\n    options:\n      heading: {package}.{name}"
    first = match[2].split(", ") if match[2] else []
    ordered = [entries.pop(name) for name in first] + list(entries.values())
    return "\n\n".join(ordered) or "*Nothing public yet.*"


def _modules(match: re.Match[str]) -> str:
    files = sorted(ROOT.glob(match[1]))
    assert files, f"no module matches {match[1]}"
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem[0] != "_"]
    return "\n\n".join(f"::: {name}" for name in names) or "*Nothing public yet.*"


def _decisions(_: re.Match[str]) -> str:
    titles = ((page.name, page.read_text(encoding="utf-8").splitlines()[0]) for page in decisions())
    return "\n".join(f"* [{title.removeprefix('# ')}]({name})" for name, title in titles)


def _commands(_: re.Match[str]) -> str:
    """Reference of the command line, generated from the Typer commands."""
    import typer

    from superbatch.lab.cli.app import app

    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, group.commands[name]) for name in sorted(group.commands))


def _command(name: str, command: Any) -> str:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [
        f"[{p.name.upper()}]" if not p.required else p.name.upper() for p in shown if _is_argument(p)
    ]
    usage = " ".join(["superbatch", name, *arguments, "[OPTIONS]"])
    rows = [f"| {_parameter(parameter)} | {_meaning(parameter)} |" for parameter in shown]
    table = "\n".join(["| | |", "| --- | --- |", *rows])
    return f"## {name}\n\n```text\n{usage}\n```\n\n{command.help}\n\n{table}"


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _parameter(parameter: Any) -> str:
    if _is_argument(parameter):
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _meaning(parameter: Any) -> str:
    text = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    plain = isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != ""
    return f"{text} (default: {default})" if plain and "(default" not in text else text
