"""Ctrl-C at any line of a window: all is as before it or as after it, and the next window is right."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

import pytest

from superbatch.errors import SuperbatchError
from tests.torch.interrupted_windows import MODES, AtLine, Run
from tests.torch.states import assert_unchanged

POINTS = 6  # lines of a window, in the default suite
MOST = 3000  # lines of a window that are all tried; of more, such as those of the check, every n-th


def wrong_at(mode: str, windows: int, number: int) -> str | None:
    """Return what is wrong after an interrupt at a line; None: nothing is."""
    run = trained(mode, windows)
    before = run.state()
    lost = False
    with AtLine(number) as interrupt, suppress(KeyboardInterrupt):
        run.update(windows)
        lost = bool(interrupt.place)
    if lost:
        return f"line {number}: the interrupt was lost at {interrupt.place}"
    if not interrupt.place:  # a line fewer than when they were counted
        return None
    if run.owned and interrupt.place.endswith("(__exit__)"):
        run.accumulate.discard()  # Python had not begun to run the end of the block
    made = run.accumulate.updates - windows
    try:
        after = run.state()
        run.reseed()
        run.update(2)
        following = run.state()
        as_it_should_be, next_one = undisturbed(mode, windows + made)
        assert_unchanged(as_it_should_be if made else before, after)
        assert_unchanged(next_one, following)
    except (AssertionError, SuperbatchError) as error:
        return f"line {number}, {interrupt.place}: {error}"
    return None


def trained(mode: str, windows: int) -> Run:
    run = Run(mode)
    for each in range(windows):
        run.update(each)
    return run


@lru_cache(maxsize=2)  # the state after a window that was made, and after one that was not
def undisturbed(mode: str, windows: int) -> tuple[Any, Any]:
    """Return the state after so many windows, and that after one more, with the numbers drawn anew."""
    plain = trained(mode, windows)
    state = plain.state()
    plain.reseed()
    plain.update(2)
    return state, plain.state()


def sweep(mode: str, windows: int, points: int | None) -> None:
    trained(mode, windows + 1)  # what is cached once per process is cached
    counted = trained(mode, windows)
    with AtLine(0) as interrupt:
        counted.update(windows)
    assert interrupt.lines > 300, "the premise: lines of the library ran"
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
