"""Tables for a terminal or as plain text, and files that are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from superbatch.errors import InputError

from ..report.table import Table, plain


def print_table(table: Table, console: Console) -> None:
    """Print a table: with lines and colours on a terminal, as aligned text of any width elsewhere."""
    if not console.is_terminal:
        print(plain(table), file=console.file)
        return
    # On a narrow terminal cells are folded, never cut: a part of a number would be a wrong number.
    rich = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,  # the first column begins at the edge, as plain text does
    )
    for number, column in enumerate(table.columns):
        rich.add_column(Text(column.heading), style="bold" if number == 0 else "", overflow="fold")
    for row in table.rows:
        rich.add_row(*map(Text, row))
    console.print(rich)


def print_sentences(sentences: Iterable[str], console: Console) -> None:
    """Print each sentence on a line of its own, wrapped on a terminal only."""
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def check_folder(folder: Path) -> None:
    """Raise InputError if the folder cannot be written to or created; create nothing."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        wrong = f"{str(existing)!r} is " + ("not writable" if existing.is_dir() else "a file")
        raise InputError(f"--out {folder}: {wrong}. Give a folder that can be written to or created.")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: after an interruption it has the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # left by a killed run; or a link, which must not be followed
    try:
        with open(unfinished, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)
