"""Length of a study with ``--quick``: a short one is timed, so that any recipe ends within a minute.

A recipe whose samples take long, or a slow machine, gets shorter runs; their length is in the report's notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS, PILOT = 40.0, 15.0
"""For all runs of a quick study, and for finding out what one costs: a minute, with room for the rest."""


def affordable(cost: Callable[[int], float], *, least: int, most: int, turns: int) -> tuple[int, bool]:
    """Return the length of each run with which all of them end in time.

    Args:
        cost: seconds of one run of a length, in samples or updates; what it takes is measured by doing it.
        least: the shortest run that says anything; it is what is done where nothing fits.
        most: the length of a quick run where time does not matter.
        turns: runs that come one after the other.

    Returns:
        The length, from `least` to `most`, and whether all runs of it should end in time.

    Examples:
        >>> affordable(lambda samples: samples / 100, least=100, most=5000, turns=4)
        (1000, True)
        >>> affordable(lambda samples: 1 + samples / 1000, least=100, most=50000, turns=4)
        (9000, True)
        >>> affordable(lambda samples: samples / 10000, least=100, most=5000, turns=4)
        (5000, True)
        >>> affordable(lambda samples: samples / 2, least=100, most=5000, turns=4)
        (100, False)
    """
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
    """Return the duration of a call.

    Args:
        run: called once.

    Examples:
        >>> 0.01 <= seconds_of(lambda: time.sleep(0.01)) < 1
        True
    """
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def note(length: str, *, fits: bool) -> str:
    """Return a note on the length of the runs and its reason.

    Args:
        length: of a run, in words.
        fits: whether all of them should end in time.

    Examples:
        >>> note("1,200 samples", fits=True)
        '--quick: 1,200 samples in each run, for all of them to end within a minute on this machine.'
    """
    if fits:
        return f"--quick: {length} in each run, for all of them to end within a minute on this machine."
    return f"--quick: {length} in each run, the fewest that say anything; with this recipe they take longer."
