"""Ctrl-C at any line leaves the state before or after the window, and the next window is right."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

import pytest

from superbatch.errors import SuperbatchError
from tests.torch.interrupted_windows import MODES, AtLine, Run
from tests.torch.states import assert_unchanged

POINTS = 6  # lines of a window that the default suite tries
MOST = 3000  # all lines are tried if a window has no more, otherwise every n-th


def wrong_at(mode: str, windows: int, number: int) -> str | None:
    """Return the error after an interrupt at a line, or None."""
    run = trained(mode, windows)
    before = run.state()
    lost = False
    with AtLine(number) as interrupt, suppress(KeyboardInterrupt):
        run.update(windows)
        lost = bool(interrupt.place)
    if lost:
        return f"line {number}: the interrupt was lost at {interrupt.place}"
    if not interrupt.place:  # fewer lines ran than were counted
        return None
    if run.owned and interrupt.place.endswith("(__exit__)"):
        run.accumulate.discard()  # __exit__ had not started
    made = run.accumulate.updates - windows
    try:
        after = run.state()
        run.reseed()
        run.update(2)
        following = run.state()
        expected, expected_next = undisturbed(mode, windows + made)
        assert_unchanged(expected if made else before, after)
        assert_unchanged(expected_next, following)
    except (AssertionError, SuperbatchError) as error:
        return f"line {number}, {interrupt.place}: {error}"
    return None


def trained(mode: str, windows: int) -> Run:
    run = Run(mode)
    for each in range(windows):
        run.update(each)
    return run


@lru_cache(maxsize=2)  # with and without the update of the interrupted window
def undisturbed(mode: str, windows: int) -> tuple[Any, Any]:
    """Return the state after some windows, and the state after one more window with a new seed."""
    plain = trained(mode, windows)
    state = plain.state()
    plain.reseed()
    plain.update(2)
    return state, plain.state()


def sweep(mode: str, windows: int, points: int | None) -> None:
    trained(mode, windows + 1)  # fills the caches of the process
    counted = trained(mode, windows)
    with AtLine(0) as interrupt:
        counted.update(windows)
    assert interrupt.lines > 300, "premise: lines of the library ran"
    stride = max(1, interrupt.lines // (points or MOST))
    numbers = range(1 + stride // 2, interrupt.lines + 1, stride)
    wrong = [found for number in numbers if (found := wrong_at(mode, windows, number))]
    assert not wrong, f"{len(wrong)} of {len(numbers)}:\n" + "\n".join(wrong[:30])


@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_some_lines(mode: str) -> None:
    sweep(mode, 1, POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [0, 1])
@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_every_line(mode: str, windows: int) -> None:
    sweep(mode, windows, None)
