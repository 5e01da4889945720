"""Read the IDX format of MNIST and its relatives, plain or gzipped.

A file is: two zero bytes, a type code, the number of dimensions, each dimension as big-endian uint32,
the values (http://yann.lecun.com/exdb/mnist/).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from superbatch.errors import InputError

UNSIGNED_BYTE = 0x08


def read_idx(path: str | Path) -> Tensor:
    """Read one IDX file of unsigned bytes."""
    path = Path(path)
    content = _content(path)
    if len(content) < 4 or content[:3] != bytes([0, 0, UNSIGNED_BYTE]):
        raise _wrong(path, f"it starts with {content[:4].hex(' ')!r}, not 00 00 08 (IDX of unsigned bytes)")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise _wrong(path, "it is cut short inside its header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise _wrong(path, f"its header states the shape {shape} but {len(content) - start} values follow")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


def find_idx(folder: Path, stem: str) -> Path:
    """Find an IDX file under the names in use: `-idx3-ubyte`, `.idx3-ubyte`, each with or without `.gz`."""
    named = folder.glob(f"{stem}[-.]idx?-ubyte*")
    found = sorted(file for file in named if file.name.endswith(("ubyte", ".gz")))
    if not found:
        missing = f"it has no file {stem}-idx?-ubyte or {stem}-idx?-ubyte.gz"
        raise InputError(
            f"The data folder {str(folder)!r}: {missing if folder.is_dir() else 'it is no folder'}. "
            "Give the folder with the four files of MNIST in IDX format."
        )
    return found[0]


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:  # EOFError and zlib.error: a damaged gzip file
        raise _wrong(path, str(error)) from error


def _wrong(path: Path, wrong: str) -> InputError:
    return InputError(f"The file {str(path)!r}: {wrong}. Give the files of MNIST in IDX format.")
