"""One-line messages for exceptions raised by a recipe's own code, with the file and the line."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from superbatch.errors import SuperbatchError

_PACKAGE = Path(__file__).resolve().parents[2]
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")


def recipe_failure(error: BaseException) -> SuperbatchError | None:
    """Return a one-line error for an exception with a frame in the user's code, else None."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not own:
        return None
    last = own[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".:")
    return SuperbatchError(
        f"{text} (line {last.lineno} of {last.filename}, in {last.name}). Correct it there; "
        "--traceback shows the whole traceback."
    )


def _is_own(filename: str) -> bool:
    """Return True for a file of the user: outside superbatch, Python and installed packages."""
    file = Path(filename).resolve()
    if not file.is_file():
        return False
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]).resolve() for name in _INSTALLED]
    return not any(file.is_relative_to(folder) for folder in (_PACKAGE, *installed))
