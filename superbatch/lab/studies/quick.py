"""Length of a study with ``--quick``: a short run is timed, so that the study takes less than a minute.

On a slow machine, or with a slow recipe, runs are shorter; a note of the report states their length.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds for all runs of a quick study, and for the timing before it; the rest of the minute is a reserve.
SECONDS, PILOT = 40.0, 15.0


def affordable(cost: Callable[[int], float], *, least: int, most: int, runs: int) -> tuple[int, bool]:
    """Return the largest length with which `runs` runs take at most `SECONDS`, and True if one exists.

    `cost` takes a length in samples or updates, makes one run, and returns its seconds. The length is between
    `least` and `most`; if `least` takes too long, it is returned with False.
    """
    if least >= most:
        return most, True
    first = cost(least)
    fixed, each = 0.0, first / least  # seconds of a run regardless of its length, and per unit of length
    # A second run of twice the length separates the two, if there is time for it.
    if 3 * first <= PILOT:
        if 6 * first <= PILOT:  # the first run has also loaded modules and data
            first = cost(least)
        second = cost(2 * least)
        each = max(second - first, second / 20) / least  # at least 5 %: the difference may be noise
        fixed = max(0.0, first - each * least)
    budget = SECONDS / runs
    fitting = (budget - fixed) / each
    return round(min(most, max(least, fitting))), fitting >= least


def seconds_of(run: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def note(length: str, *, fits: bool) -> str:
    """Return a note that states the length of the runs and its reason."""
    if fits:
        return f"--quick: {length} in each run, so that all runs end within a minute on this machine."
    return f"--quick: {length} in each run, the fewest that are meaningful. The study may take over a minute."
