"""An error at any line of the library leaves the state before or after the window, and the next one is right.

The error is raised in windows that succeed, that fail in the user's loss, and that run out of memory. The one
exception is a line that calls the user's optimizer, scheduler or hook. An error at such a line cannot be
distinguished from one inside the user's code, so the library reports it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from superbatch.errors import OptimizerError
from superbatch.torch.window.update_rule import Once
from tests.torch.interrupted_windows import MODES, AtLine, Run
from tests.torch.states import assert_unchanged

POINTS = 20  # lines of a window that the default suite tries
MOST = 2500  # all lines are tried if a window has no more, otherwise every n-th
ERRORS: dict[str, type[Exception]] = {"error": ValueError, "no memory": MemoryError}
WINDOWS = {
    "succeeds": None,
    "fails in the loss": ZeroDivisionError,
    "runs out of memory": torch.OutOfMemoryError,
}
CALLS = ("update_rule.py", "_note")  # places that call the user's code, and the hook that it calls
# State that depends on the split, which is finer after memory has run out.
OF_SPLIT = (".sizing.", ".noise.", ".check.")
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.02}


def breaks(window: str) -> BaseException | None:
    """Return the error that the second loss of a window raises."""
    kind = WINDOWS[window]
    return None if kind is None else kind("CUDA out of memory.")


def same(one: Any, other: Any, rounding: float) -> bool:
    """Return whether two values are equal up to rounding."""
    if not isinstance(one, Tensor) or not one.is_floating_point():
        return bool(torch.equal(one, other) if isinstance(one, Tensor) else one == other)
    a, b = one.double(), other.double()
    return float((a - b).norm()) <= rounding * (1 + float(b.norm()))


def assert_same(before: Mapping[str, Any], after: Mapping[str, Any], rounding: float) -> None:
    """Compare the state that does not depend on the split."""
    names = [name for name in before if not any(part in name for part in OF_SPLIT)]
    assert set(names) <= after.keys()
    changed = [name for name in names if not same(before[name], after[name], rounding)]
    assert not changed, changed[:12]


class Cell:
    """Windows of one mode in which one kind of error is raised.

    Args:
        mode: key of `MODES`.
        error: key of `ERRORS`.
        window: key of `WINDOWS`.
        windows: number of windows before the tested one.
    """

    def __init__(self, mode: str, error: str, window: str, windows: int) -> None:
        self.mode, self.error, self.window, self.windows = mode, ERRORS[error], window, windows
        # Random numbers depend on the split.
        self.draws = error != "no memory" and window != "runs out of memory"
        self.rounding = ROUNDING[MODES[mode].dtype]
        self.undisturbed = lru_cache(self._undisturbed)
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []

    def trained(self, windows: int) -> Run:
        """Return a training after some windows."""
        run = Run(self.mode, draws=self.draws)
        for number in range(windows):
            run.update(number)
        return run

    def _undisturbed(self, windows: int) -> tuple[Any, Any]:
        """Return the state after some windows, and the state after one more window with a new seed."""
        run = self.trained(windows)
        state = run.state()
        run.reseed()
        run.update(2)
        return state, run.state()

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state without the sizes learned from running out of memory."""
        return {name: each for name, each in state.items() if self.draws or ".sizing." not in name}

    def lines(self) -> int:
        """Return how many lines the window runs."""
        self.trained(self.windows + 1)  # fills the caches of the process
        run = self.trained(self.windows)
        run.breaks = breaks(self.window)
        with AtLine(0) as counted:
            outcome(run, self.windows)
        return counted.lines

    def at(self, number: int) -> None:
        """Raise the error at a line and compare the states."""
        run = self.trained(self.windows)
        before = run.state()
        run.breaks = breaks(self.window)

        def raises() -> NoReturn:
            raise self.error("planted")

        with AtLine(number, raises) as planted:
            raised = outcome(run, self.windows)
        if not planted.place:  # fewer lines ran than were counted
            return
        run.breaks = None
        if run.owned and "(__exit__)" in planted.place:
            run.accumulate.discard()  # __exit__ had not started, and the next window would ask for discard()
        made, after = run.accumulate.updates - self.windows, run.state()
        run.reseed()
        try:
            again = outcome(run, 2)
            if isinstance(again, OptimizerError) and "torn" in str(again) and raised is not None:
                assert any(part in planted.place for part in CALLS), "torn, but not inside user code"
                self.found["reported"] += 1
                return
            assert again is None, again
            expected, following = self.undisturbed(self.windows + made)
            if not made:
                assert_unchanged(self.kept(before), self.kept(after))
            elif raised is not None and "(take)" in planted.place:  # as if a scheduler had failed
                self.found["reported"] += 1
                return
            else:
                assert_same(expected, after, self.rounding)
            assert_same(following, run.state(), self.rounding)
            self.found["as after" if made else "as before"] += 1
        except AssertionError as error:
            self.wrong.append(f"line {number}, {planted.place}, {type(raised).__name__}: {str(error)[:300]}")

    def sweep(self, most: int) -> None:
        """Raise the error at each line, or at every n-th line."""
        lines = self.lines()
        assert lines > 300, "premise: lines of the library ran"
        stride = max(1, lines // most)
        for number in range(1 + stride // 2, lines + 1, stride):
            self.at(number)
        assert not self.wrong, f"{len(self.wrong)} of {lines // stride}:\n" + "\n".join(self.wrong[:30])
        assert self.found["as before"], "premise: some windows were rolled back"


def outcome(run: Run, number: int) -> Exception | None:
    """Make an update; return its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # memory ran out
        try:
            run.update(number)
        except Exception as error:  # noqa: BLE001  (it is returned)
            return error
    return None


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_an_error_at_some_lines(mode: str, error: str) -> None:
    Cell(mode, error, "succeeds", 1).sweep(POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [0, 1])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("mode", MODES)
def test_an_error_at_every_line(mode: str, error: str, window: str, windows: int) -> None:
    cell = Cell(mode, error, window, windows)
    cell.sweep(MOST)
    print(f"{mode}, {error}, a window that {window}: {dict(cell.found)}")  # shown by -s


def test_a_call_that_did_not_start_is_repeated() -> None:
    """Like a call without memory, a call with wrong arguments raises before the function has a frame."""
    numbers = iter([0, 1])
    call = Once(lambda: 1 / next(numbers))
    with pytest.raises(ZeroDivisionError):
        call.run()
    assert call.broken is not None, "premise: the Python function had started"
    with pytest.raises(ZeroDivisionError):
        call.run()
    assert not call.returned
    needs_one: Any = lambda one: one  # noqa: E731 - a function, not a method
    not_started = Once(needs_one)
    for _ in range(2):
        with pytest.raises(TypeError):
            not_started.run()
    assert not_started.broken is None and not not_started.returned


def test_a_failed_call_in_c_is_not_repeated() -> None:
    """A C function has no frame that shows whether it started."""
    left = iter([])
    for call in (Once(left.__next__), Once(partial(next, left))):
        with pytest.raises(StopIteration):
            call.run()
        assert call.broken is not None


def test_a_scheduler_that_runs_out_of_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is neither repeated nor silently skipped."""
    run = Run("two optimizers")
    first, second = run.schedulers
    steps = first.step

    def fails() -> None:
        steps()
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(first, "step", fails)
    with pytest.raises(torch.OutOfMemoryError):
        run.update(0)
    assert run.accumulate.updates == 1
    assert first.last_epoch == second.last_epoch == 1
