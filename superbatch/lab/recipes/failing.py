"""Errors that the code of a recipe raises: one line that names the file and the line of the mistake."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from superbatch.errors import SuperbatchError

_PACKAGE = Path(__file__).resolve().parents[2]
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")


def recipe_failure(error: BaseException) -> SuperbatchError | None:
    """Describe an error of the user's own code in one line; None if it passed installed packages alone."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not own:
        return None
    place = own[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".:")
    return SuperbatchError(
        f"{text} (line {place.lineno} of {place.filename}, in {place.name}). Correct it there; "
        "with --traceback the whole way to it is shown."
    )


def _is_own(filename: str) -> bool:
    """Return whether a file is the user's: outside of superbatch, of Python and of installed packages."""
    file = Path(filename).resolve()
    if not file.is_file():
        return False
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]).resolve() for name in _INSTALLED]
    return not any(file.is_relative_to(folder) for folder in (_PACKAGE, *installed))
