"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence: a suggestion of the closest name, or a full stop if none is close.

    Examples:
        >>> did_you_mean("digit", ["digits", "text"]), did_you_mean("image", ["digits", "text"])
        ("; did you mean 'digits'?", '.')
    """
    close = get_close_matches(name, [*names], n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
