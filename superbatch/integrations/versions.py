"""Tested versions of the libraries that superbatch integrates with."""

from __future__ import annotations

import re
from importlib.metadata import version

from ..torch.warn import warn

TESTED = {
    "accelerate": ("1.15", "1.15"),
    "lightning": ("2.6", "2.6"),
    "sentence-transformers": ("6.2", "6.2"),
    "transformers": ("5.23", "5.24"),
    "trl": ("1.16", "1.16"),
}


def check_version(library: str) -> None:
    """Warn if the installed version of a library is older or newer than the tested ones.

    Args:
        library: name on the package index, a key of `TESTED`.

    Warns:
        UserWarning: the version is outside the tested range.

    Examples:
        >>> TESTED["lightning"]
        ('2.6', '2.6')
    """
    installed, (oldest, newest) = version(library), TESTED[library]
    if not _minor(oldest) <= _minor(installed) <= _minor(newest):
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        warn(
            f"superbatch.integrations was tested with {library} {tested}, but {installed} is installed. If "
            f"training fails or a number looks wrong, run: pip install '{library}=={newest}.*'."
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
