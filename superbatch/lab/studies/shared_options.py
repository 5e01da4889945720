"""Parts that the commands share: progress, interruption, the recipe, and fields of the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from superbatch._version import __version__

from ..recipes import Recipe, load_recipe


@dataclass(frozen=True)
class Progress:
    """Progress of a command, in units of work such as micro-batches."""

    done: int
    total: int
    # The step that has just ended, as text; a comparison or a survey gives (seed, arm, value) after each run.
    finished: Any = None


Show = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Ignore the progress."""


class Interrupted(KeyboardInterrupt):
    """A command was interrupted by Ctrl-C. The attribute `report` has its partial report."""

    def __init__(self, report: Any) -> None:
        self.report = report


def given_options(options: Any) -> dict[str, str]:
    """Return the options that are not None, as text."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    if isinstance(values.get("splits"), Sequence) and not isinstance(values["splits"], str):
        values["splits"] = ",".join(values["splits"])
    return {name: str(value) for name, value in values.items() if value is not None}


def versions(**frameworks: str) -> dict[str, str]:
    """Return name -> version: superbatch, the frameworks, Python and the platform."""
    return {
        "superbatch": __version__,
        **frameworks,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def report_fields(
    recipe: Recipe, options: Any, start: float, *, partial: bool, **frameworks: str
) -> dict[str, Any]:
    """Return the fields that all reports share. `start` is a value of ``time.monotonic()``."""
    return {
        "recipe": recipe.name,
        "description": recipe.description,
        "seconds": time.monotonic() - start,
        "partial": partial,
        "versions": versions(**frameworks),
        "command": given_options(options),
    }


def resolve_recipe(recipe: str | Recipe, options: Any) -> Recipe:
    """Return the recipe, loaded with the option `data` if it is given by name."""
    return load_recipe(recipe, data=options.data) if isinstance(recipe, str) else recipe
