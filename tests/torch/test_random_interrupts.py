"""Ctrl-C at random times of a window, sent as a terminal does: all is as before it or as after it."""

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

SIGNALS = 78  # in each of 13 modes: a thousand
WINDOWS = 1  # made before the one that is interrupted


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
    """Interrupt a window after so many seconds; return what is wrong, and if the window was left early."""
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
            while not sent:  # an interrupt inside join() may be a RuntimeError of Python's
                time.sleep(0.001)
            end = time.monotonic() + 1.0
            while not swallowed and time.monotonic() < end:
                time.sleep(0.01)
            # Python itself ignores what is raised in a callback of the garbage collector: others have some.
            assert swallowed, "the signal was lost"
        sender.join()
    finally:
        sys.unraisablehook = hook
    assert all(isinstance(each, KeyboardInterrupt) for each in swallowed), swallowed
    made = run.accumulate.updates - WINDOWS
    try:
        if run.owned and not made:
            run.accumulate.discard()  # in case Python had not begun to run the end of the block
        after = run.state()
        run.reseed()
        run.update(2)
        as_it_should_be, following = undisturbed(mode, WINDOWS + made)
        assert_unchanged(as_it_should_be if made else before, after)
        assert_unchanged(following, run.state())
    except (AssertionError, SuperbatchError) as error:
        return f"after {1e3 * delay:.2f} ms, made {made}: {error}", not finished
    return None, not finished


def hunt(mode: str, signals: int) -> None:
    length, draw = duration(mode), random.Random(mode)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # a window is over before the sender's thread would get its turn
    try:
        found = [wrong_after(mode, draw.uniform(0.0, 1.1 * length)) for _ in range(signals)]
        while signals == SIGNALS and early(found) <= signals // 4 and len(found) < 8 * signals:
            found.append(
                wrong_after(mode, draw.uniform(0.0, 0.3 * length))
            )  # other programs delay the sender
    finally:
        sys.setswitchinterval(before)
    wrong = [text for text, _ in found if text is not None]
    assert not wrong, f"{len(wrong)} of {signals}:\n" + "\n".join(wrong[:10])
    if signals == SIGNALS:
        assert early(found) > signals // 4, "the premise: windows were interrupted"


def early(found: list[tuple[str | None, bool]]) -> int:
    """Return how many windows were left early."""
    return sum(left for _, left in found)


@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_two_random_times(mode: str) -> None:
    hunt(mode, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_random_times(mode: str) -> None:
    hunt(mode, SIGNALS)
