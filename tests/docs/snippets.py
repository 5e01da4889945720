"""Parse the code blocks of a page of documentation and their marks.

    ```python                       run; all blocks of a page share one namespace, from top to bottom
    ```python title="recipe.py"     run, and written to that file for later blocks
    ```console                      needs a mark: <!-- run --> or <!-- not run: the reason -->
    ```text                         never run; with <!-- output --> it must equal the previous block's output

A mark is on the line above the fence; blank lines between do not matter. `<!-- not run: the reason -->` works
for python blocks too. The test prints every reason. In an output, `...` matches any text. A page that begins
with `<!-- needs: jax, optax -->` is skipped, with a reason, if one of these is not installed. Any other
language (bash, pycon, ...) is an error, so that no snippet stays unexecuted unnoticed.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"<!-- (?P<kind>run|not run|output)(: (?P<reason>.+))? -->")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[\w+-]*)(?P<info>.*)$")
NEEDS = re.compile(r"^<!-- needs: (?P<names>[\w, ]+) -->$", re.MULTILINE)
TITLE = re.compile(r'title="([\w.]+)"')
EXECUTABLE = {"python", "console"}
NOT_EXECUTABLE = {"text", "toml", "yaml", "json", "ini", "bibtex", "diff", "csv", "html"}


class MarkError(Exception):
    """A block of a page is of none of the kinds above."""


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is the number of its first line of text, counted from 1."""

    language: str
    text: str
    line: int
    mark: str | None = None
    reason: str | None = None
    title: str | None = None

    @property
    def is_run(self) -> bool:
        return self.language in EXECUTABLE and self.mark != "not run"

    @property
    def is_output(self) -> bool:
        return self.mark == "output"


def _check(block: Block, page: str) -> Block:
    where = f"{page}:{block.line - 1}"
    if block.language not in EXECUTABLE | NOT_EXECUTABLE:
        allowed = ", ".join(sorted(EXECUTABLE | NOT_EXECUTABLE))
        raise MarkError(f"{where}: a block of language {block.language!r}; write one of {allowed}")
    if block.language == "console" and block.mark not in ("run", "not run"):
        raise MarkError(f"{where}: mark the console block <!-- run --> or <!-- not run: the reason -->")
    if block.mark == "not run" and not block.reason:
        raise MarkError(f"{where}: say why the block is not run: <!-- not run: the reason -->")
    if block.language in NOT_EXECUTABLE and block.mark in ("run", "not run"):
        raise MarkError(f"{where}: <!-- {block.mark} --> means nothing for {block.language}")
    return block


def read_blocks(text: str, page: str) -> list[Block]:
    """Return the blocks of a page in order; `page` is its name in errors."""
    lines = text.splitlines()
    blocks: list[Block] = []
    mark: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        fence = FENCE.match(line)
        if fence is None:
            if line.strip():
                mark = MARK.fullmatch(line.strip())
            continue
        first = number
        while number < len(lines) and lines[number].strip() != fence["ticks"]:
            number += 1
        if number == len(lines):
            raise MarkError(f"{page}:{first}: the block is never closed")
        indent = len(fence["indent"])
        body = "\n".join(row[indent:] if not row[:indent].strip() else row for row in lines[first:number])
        kind, reason = (mark["kind"], mark["reason"]) if mark else (None, None)
        title = TITLE.search(fence["info"])
        block = Block(fence["language"], body, first + 1, kind, reason, title[1] if title else None)
        blocks.append(_check(block, page))
        number, mark = number + 1, None
    return blocks


def pages(root: Path) -> list[Path]:
    """Return README.md and every page of docs/."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def needed_packages(text: str) -> list[str]:
    """Return the packages in a page's `<!-- needs: jax, optax -->`."""
    found = NEEDS.search(text)
    return [name.strip() for name in found["names"].split(",")] if found else []


def missing_packages(text: str) -> list[str]:
    """Return the packages that a page needs and that are not installed."""
    return [name for name in needed_packages(text) if importlib.util.find_spec(name) is None]


def commands(block: Block) -> list[str]:
    """Return the commands of a console block: the text after `$ `, continued after a backslash."""
    joined = block.text.replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def same_output(expected: str, printed: str) -> bool:
    """Return True if `printed` matches `expected`: `...` is any text, spaces at line ends do not count."""
    wanted = [line.rstrip() for line in expected.strip().splitlines()]
    got = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    pattern = re.escape("\n".join(wanted)).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, got, re.DOTALL) is not None
