"""Ctrl-C at random times of a window, sent as a terminal does: the window is rolled back or complete."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress

import pytest

from superbatch.errors import SuperbatchError
from tests.torch.interrupted_windows import MODES
from tests.torch.states import assert_unchanged
from tests.torch.test_interrupt_sweep import trained, undisturbed

SIGNALS = 78  # in each of 13 modes: about a thousand
WINDOWS = 1  # before the interrupted one


def duration(mode: str) -> float:
    """Return the seconds of a window."""
    times = []
    for _ in range(5):
        run = trained(mode, WINDOWS)
        began = time.perf_counter()
        run.update(WINDOWS)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def wrong_after(mode: str, delay: float) -> tuple[str | None, bool]:
    """Interrupt a window after `delay` seconds; return an error, if any, and whether it ended early."""
    run = trained(mode, WINDOWS)
    before = run.state()
    finished, swallowed, sent = False, list[object](), list[bool]()

    def send() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        sent.append(True)

    sender = threading.Timer(delay, send)
    hook, sys.unraisablehook = sys.unraisablehook, lambda args: swallowed.append(args.exc_value)
    try:
        with suppress(KeyboardInterrupt):
            sender.start()
            run.update(WINDOWS)
            finished = True
            while not sent:  # an interrupt inside join() may raise a RuntimeError
                time.sleep(0.001)
            end = time.monotonic() + 1.0
            while not swallowed and time.monotonic() < end:
                time.sleep(0.01)
            # Python ignores exceptions in callbacks of the garbage collector, which other packages install.
            assert swallowed, "the signal was lost"
        sender.join()
    finally:
        sys.unraisablehook = hook
    assert all(isinstance(each, KeyboardInterrupt) for each in swallowed), swallowed
    made = run.accumulate.updates - WINDOWS
    try:
        if run.owned and not made:
            run.accumulate.discard()  # if Python had not begun to run __exit__
        after = run.state()
        run.reseed()
        run.update(2)
        expected, following = undisturbed(mode, WINDOWS + made)
        assert_unchanged(expected if made else before, after)
        assert_unchanged(following, run.state())
    except (AssertionError, SuperbatchError) as error:
        return f"after {1e3 * delay:.2f} ms, made {made}: {error}", not finished
    return None, not finished


def interrupt_at_random_times(mode: str, signals: int) -> None:
    length, draw = duration(mode), random.Random(mode)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # else a window ends before the sender's thread runs
    try:
        found = [wrong_after(mode, draw.uniform(0.0, 1.1 * length)) for _ in range(signals)]
        while signals == SIGNALS and count_early(found) <= signals // 4 and len(found) < 8 * signals:
            # Other programs delay the sender.
            found.append(wrong_after(mode, draw.uniform(0.0, 0.3 * length)))
    finally:
        sys.setswitchinterval(before)
    wrong = [text for text, _ in found if text is not None]
    assert not wrong, f"{len(wrong)} of {signals}:\n" + "\n".join(wrong[:10])
    if signals == SIGNALS:
        assert count_early(found) > signals // 4, "premise: windows were interrupted"


def count_early(found: list[tuple[str | None, bool]]) -> int:
    """Return the number of windows that ended early."""
    return sum(left for _, left in found)


@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_two_random_times(mode: str) -> None:
    interrupt_at_random_times(mode, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_random_times(mode: str) -> None:
    interrupt_at_random_times(mode, SIGNALS)
