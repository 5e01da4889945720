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
    sender = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    finished = False
    with suppress(KeyboardInterrupt):
        sender.start()
        run.update(WINDOWS)
        finished = True
        sender.join()
        time.sleep(1.0)  # Python runs the handler between two lines of the main thread
        raise AssertionError("the signal was lost")
    sender.join()
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
    finally:
        sys.setswitchinterval(before)
    wrong = [text for text, _ in found if text is not None]
    assert not wrong, f"{len(wrong)} of {signals}:\n" + "\n".join(wrong[:10])
    if signals == SIGNALS:
        assert sum(early for _, early in found) > signals // 4, "the premise: windows were interrupted"


@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_two_random_times(mode: str) -> None:
    hunt(mode, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_random_times(mode: str) -> None:
    hunt(mode, SIGNALS)
