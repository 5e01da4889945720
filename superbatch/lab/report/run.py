"""Fields that the reports of all commands have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Origin of a report: what ran, for how long, and with which options and versions."""

    recipe: str
    description: str  # the model and the data
    seconds: float  # wall time of the whole command
    partial: bool  # True if the command was interrupted before its end
    versions: dict[str, str]  # package -> version, and the platform
    command: dict[str, str]  # option -> value, for each option that was given
    notes: tuple[str, ...]  # remarks on the numbers, and their limits
