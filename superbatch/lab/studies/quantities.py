"""Values of options as people write them: ``2GiB``, ``500 MB``, ``8,16,32``."""

from __future__ import annotations

import re

from superbatch.errors import InputError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def parse_bytes(text: str, flag: str) -> int:
    """Read a number of bytes: K and KiB are 1024, kB is 1000, likewise M, G and T; no unit: bytes.

    Examples:
        >>> [parse_bytes(text, "--limit") for text in ("2GiB", "1.5 MB", "16k", "123")]
        [2147483648, 1500000, 16384, 123]
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
    count = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if count < 1:  # no unit of that name, or nothing
        raise InputError(f"{flag} {text} is no number of bytes. Write it as 2GiB, 500MB or 123456.")
    return count


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Read sizes of micro-batches.

    Examples:
        >>> parse_sizes("8, 16,32", "--sizes")
        (8, 16, 32)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(f"{flag} {text}: sizes are whole numbers of samples. Write them as 8,16,32.")
    return tuple(map(int, parts))
