"""Arms of a study with given values, for tests of conclusions."""

from __future__ import annotations

import math

from superbatch.lab.report.study import StudyArm, StudyRun

METRIC = "test accuracy, %"


def planted(
    name: str, values: dict[str, list[float]] | None = None, facts: dict[str, float] | None = None
) -> StudyArm:
    """Return an arm with these values, one per seed."""
    values = values or {}
    runs = tuple(
        StudyRun(seed=seed, values={key: each[seed] for key, each in values.items()})
        for seed in range(len(next(iter(values.values()), [])))
    )
    return StudyArm(name=name, how="planted", facts=facts or {}, runs=runs)


def around(middle: float, spread: float = 0.01, count: int = 6) -> list[float]:
    """Return distinct values around a number, with a relative spread."""
    return [middle * (1 + spread * math.sin(3 * seed + middle)) for seed in range(count)]
