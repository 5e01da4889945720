"""Pairs of texts as word numbers: by default docstrings and function bodies of Python's standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from superbatch.errors import InputError

LEFT_OUT = frozenset(("site-packages", "test", "tests", "idlelib", "lib2to3"))
VOCABULARY, QUERY_WORDS, CODE_WORDS, FEWEST = 4096, 32, 64, 5
TRAINING_FROM, LEAST = 1500, 2000  # held-out pairs before the training pairs, and fewest pairs in all
Pair = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Texts:
    """Pairs as word numbers; 0 is padding and stands for unknown words."""

    queries: Tensor  # int64 (n, 32)
    codes: Tensor  # int64 (n, 64)
    words: int  # size of the embedding table


def load_texts(data: str | Path | None = None) -> Texts:
    """Read the documented functions of a folder of Python sources, or of the standard library."""
    found = [*_pairs(library(data))]
    if len(found) < LEAST:
        raise InputError(
            f"{str(library(data))!r} has {len(found)} documented functions, but code-search needs {LEAST}. "
            "Pass a larger folder of Python sources with --data, or one with files of pairs (.tsv, .jsonl)."
        )
    return shuffled(found)


def shuffled(pairs: Sequence[Pair]) -> Texts:
    """Return pairs as word numbers, in a fixed random order; the first 1500 are held out."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return as_numbers([pairs[i] for i in order], training_from=TRAINING_FROM)


def library(data: str | Path | None) -> Path:
    """Return the given folder of sources, or that of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"] if data is None else data)


def files_of(folder: Path, suffix: str, *, left_out: Set[str]) -> list[Path]:
    """Return the sorted files with a suffix, except files and folders whose name is in `left_out`."""
    found = sorted(folder.rglob(f"*.{suffix}"))
    return [path for path in found if not left_out & set(path.relative_to(folder).parts)]


def as_numbers(pairs: Sequence[Pair], *, training_from: int) -> Texts:
    """Return pairs as word numbers, the most frequent words first.

    Only words that occur in at least two training pairs have a number.
    """
    counts = Counter(word for query, code in pairs[training_from:] for word in sorted({*query, *code}))
    known = [word for word, count in counts.most_common(VOCABULARY - 1) if count > 1]
    numbers = {word: number for number, word in enumerate(known, start=1)}
    return Texts(
        _table([query for query, _ in pairs], numbers, QUERY_WORDS),
        _table([code for _, code in pairs], numbers, CODE_WORDS),
        VOCABULARY,
    )


def _table(texts: Sequence[Sequence[str]], numbers: dict[str, int], length: int) -> Tensor:
    rows = [[numbers[word] for word in text if word in numbers][:length] for text in texts]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int64)


def _pairs(library: Path) -> Iterator[Pair]:
    """Yield the words of the docstring and of the body of each documented function, without duplicates."""
    seen = set[str]()
    for path in files_of(library, "py", left_out=LEFT_OUT):
        for node in _functions(path):
            query = words(ast.get_docstring(node) or "")[:40]
            if len(query) < FEWEST or (key := " ".join(query)) in seen:
                continue
            code = words(" ".join(map(ast.unparse, node.body[1:])))[:80]
            if len(code) >= FEWEST:
                seen.add(key)
                yield query, code


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        tree = ast.parse(path.read_text("utf8"))
    except (SyntaxError, ValueError, OSError):  # other encodings, and files that are invalid on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            yield node


def words(text: str) -> list[str]:
    """Return the words of two or more letters in a text, in lower case; camel-case names are split.

    Examples:
        >>> words("readLine(self, 3)")
        ['read', 'line', 'self']
    """
    return [word.lower() for word in re.findall("[A-Za-z]{2,}", re.sub("([a-z0-9])([A-Z])", r"\1 \2", text))]
