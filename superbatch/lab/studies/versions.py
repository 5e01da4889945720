"""Origin of a report: what was run, with which versions and options, and for how long."""

from __future__ import annotations

import platform
import time
from typing import Any

from superbatch._version import __version__

from ..recipes import Recipe
from .shared_options import asked


def versions(**frameworks: str) -> dict[str, str]:
    """Return name -> version: superbatch, the frameworks, Python and the platform."""
    return {
        "superbatch": __version__,
        **frameworks,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def origin(recipe: Recipe, options: Any, start: float, *, partial: bool, **frameworks: str) -> dict[str, Any]:
    """Return the fields that the reports of all commands share; `start` is of the monotonic clock."""
    return {
        "recipe": recipe.name,
        "description": recipe.description,
        "seconds": time.monotonic() - start,
        "partial": partial,
        "versions": versions(**frameworks),
        "command": asked(options),
    }
