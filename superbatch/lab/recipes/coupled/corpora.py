"""Long and short texts as bytes: Python sources and their comments, or a text corpus and its lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from superbatch.errors import InputError

from ..text import collate
from .docstrings import LEFT_OUT, files_of, library

LONG, SHORT = 128, 24  # bytes of a long text, and largest number of bytes of a short one
START = 256  # input before the first byte, and padding after the last
LEAST, MOST = 1000, 10_000  # texts of each kind: fewest in the data, and most that are used
COMMENT = re.compile(rb"\s*# ([A-Z][ -~]{10,})")
SHORTEST_LINE = 10

Texts = dict[str, Tensor]
Found = tuple[list[bytes], list[bytes]]


@dataclass(frozen=True)
class Corpus:
    """Texts in a fixed random order, with names of the two kinds."""

    longs: Texts  # of 128 bytes
    shorts: Texts  # of at most 24 bytes
    long: str  # name of the long texts, such as ``"source"``
    short: str  # name of the short texts, such as ``"comments"``
    where: str  # origin of the texts


def corpus(data: str | Path | None) -> Corpus:
    """Read long and short texts from Python sources, or from ``.txt`` files if a folder has no sources.

    Long texts are pieces of 128 bytes. Short texts are comments of sources, or the starts of lines of text.
    """
    folder = library(data)
    sources = files_of(folder, "py", left_out={*LEFT_OUT, "encodings"})
    texts = files_of(folder, "txt", left_out=set())
    use_text = data is not None and not sources
    long, short = ("text", "lines") if use_text else ("source", "comments")
    read: Callable[[bytes], Found] = _of_text if use_text else _of_source
    found = [read(path.read_bytes()) for path in (texts if use_text else sources)]
    longs, shorts = ([text for each in found for text in each[kind]] for kind in (0, 1))
    if min(len(longs), len(shorts)) < LEAST:
        raise InputError(
            f"{str(folder)!r} has {len(longs)} pieces of {long} and {len(shorts)} {short}, but token-means "
            f"needs {LEAST} of each. Pass a larger folder of Python sources or of .txt files with --data."
        )
    g = torch.Generator().manual_seed(0)
    where = "the standard library" if data is None else repr(str(data))
    return Corpus(_shuffled(longs, g), _shuffled(shorts, g), long, short, where)


def _of_source(text: bytes) -> Found:
    shorts = [found[1][:SHORT] for line in text.splitlines() if (found := COMMENT.fullmatch(line))]
    # Every 16th piece, so that no file dominates.
    return [text[i : i + LONG] for i in range(0, len(text) - LONG, 16 * LONG)], shorts


def _of_text(text: bytes) -> Found:
    lines = [line for each in text.splitlines() if len(line := each.strip()) >= SHORTEST_LINE]
    joined = b" ".join(lines)
    longs = [joined[i : i + LONG] for i in range(0, len(joined) - LONG, LONG)]
    return longs, [line[:SHORT] for line in lines]


def _shuffled(texts: list[bytes], g: torch.Generator) -> Texts:
    order = torch.randperm(len(texts), generator=g)[:MOST].tolist()
    return collate([texts[i] for i in order], first=START, padding=START)
