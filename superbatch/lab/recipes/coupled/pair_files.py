"""Pairs of texts from the user's files: a query and the passage that answers it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from superbatch.errors import InputError

from .docstrings import LEAST, Pair

KINDS = (".jsonl", ".tsv")


def pair_files(folder: Path) -> list[Path]:
    """Return the sorted files of pairs directly in a folder."""
    return sorted(path for path in folder.glob("*") if path.suffix in KINDS) if folder.is_dir() else []


def read_pairs(files: list[Path]) -> list[Pair]:
    """Read pairs without repeated queries or passages, which would be false negatives of each other.

    A line of ``.tsv`` is a query, a tab and a passage. A line of ``.jsonl`` is an object with the keys
    ``"query"`` and ``"passage"``.
    """
    seen, found = set[str](), list[Pair]()
    for path in files:
        for query, passage in _lines(path):
            pair = words_of(query), words_of(passage)
            keys = {f"query {' '.join(pair[0])}", f"passage {' '.join(pair[1])}"}
            if all(pair) and not seen & keys:
                seen |= keys
                found.append(pair)
    if len(found) < LEAST:
        raise InputError(
            f"{str(files[0].parent)!r} has {len(found)} different pairs of texts, but code-search needs "
            f"{LEAST}. Add pairs to its .tsv or .jsonl files."
        )
    return found


def words_of(text: str) -> list[str]:
    """Return the words of two or more characters in a text, in lower case."""
    return re.findall(r"\w{2,}", text.lower())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    parse = _of_json if path.suffix == ".jsonl" else _of_tabs
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse(line.rstrip("\n"), f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}. Save it as UTF-8 text.") from error


def _of_tabs(line: str, where: str) -> tuple[str, str]:
    parts = line.split("\t")
    if len(parts) != 2:
        raise InputError(f"{where} has {len(parts)} columns, not 2. Write a query, one tab and a passage.")
    return parts[0], parts[1]


def _of_json(line: str, where: str) -> tuple[str, str]:
    try:
        pair: Any = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}. Write one object on each line.") from error
    if not isinstance(pair, dict):
        raise InputError(f'{where} is not an object. Write {{"query": "...", "passage": "..."}}.')
    query, passage = pair.get("query"), pair.get("passage")
    if not (isinstance(query, str) and isinstance(passage, str)):
        raise InputError(
            f"{where} has the keys {', '.join(map(repr, pair))}. "
            'Write {"query": "...", "passage": "..."} with two strings.'
        )
    return query, passage
