"""Warnings that point at the line of the user's program that called superbatch."""

from __future__ import annotations

import inspect
import warnings

# The frames of torch and contextlib lie between the user's call and ours.
_INSIDE = ("superbatch", "torch", "contextlib", "functools")


def warn(text: str) -> None:
    """Warn at the innermost line outside of superbatch and torch.

    Examples:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("memory ran out")
        >>> str(caught[0].message)
        'memory ran out'
    """
    level, frame = 0, inspect.currentframe()
    # By module name, because a package of the user may be in any folder.
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level + 1)
