"""Length of a study with ``--quick``: a short one is timed, so that any recipe ends within a minute.

A recipe whose samples take long, or a slow machine, gets shorter runs; their length is in the report's notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds for all runs of a quick study, and for timing one: a minute, with room for the rest.
SECONDS, PILOT = 40.0, 15.0


def affordable(cost: Callable[[int], float], *, least: int, most: int, turns: int) -> tuple[int, bool]:
    """Return the samples of each run with which all `turns` end in time; False: the least take longer."""
    if least >= most:
        return most, True
    first = cost(least)
    fixed, each = 0.0, first / least  # what is spent on a run, however long; on each sample
    if 3 * first <= PILOT:
        if 6 * first <= PILOT:  # the very first run has also loaded what all others use
            first = cost(least)
        second = cost(2 * least)
        each = max(second - first, second / 20) / least  # noise may hide what samples take
        fixed = max(0.0, first - each * least)
    budget = SECONDS / turns
    fitting = (budget - fixed) / each
    return round(min(most, max(least, fitting))), fitting >= least


def seconds_of(run: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def note(length: str, *, fits: bool) -> str:
    """Return a note on the length of the runs and its reason."""
    if fits:
        return f"--quick: {length} in each run, for all of them to end within a minute on this machine."
    return f"--quick: {length} in each run, the fewest that say anything; with this recipe they take longer."
