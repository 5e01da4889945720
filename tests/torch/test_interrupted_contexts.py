"""Ctrl-C while a context is entered or left does not delay its exit until the error is freed."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest
import torch

from superbatch.errors import SuperbatchError
from superbatch.torch.modes import Modes
from tests.torch.interrupted_windows import MODES, interrupt
from tests.torch.states import assert_unchanged
from tests.torch.test_interrupt_sweep import trained, undisturbed

POINTS = 8  # places of a window that the default suite tries


class AtEdge:
    """Interrupts after the n-th C function that an `__enter__` or `__exit__` calls.

    A context of `contextlib.contextmanager` is then entered, but Python will not call its `__exit__`.

    Attributes:
        calls: number of such C functions.
        place: file, line and method of the interrupt.
    """

    def __init__(self, number: int) -> None:
        """Count the calls and interrupt the n-th one, or none if `number` is 0."""
        self.number, self.calls, self.place = number, 0, ""

    def __enter__(self) -> AtEdge:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "c_return" or code.co_name not in {"__enter__", "__exit__"}:
            return
        if code.co_filename.endswith("interrupts.py") or code.co_filename == __file__:
            return
        self.calls += 1
        if self.calls == self.number:
            self.place = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
            interrupt()


def active_modes() -> list[Any]:
    now = Modes()
    return [*now.functions, *now.dispatch, now.grad]


def wrong_at(mode: str, number: int) -> str | None:
    """Return the error after an interrupt at a place, or after the interrupt is freed, or None."""
    run = trained(mode, 1)
    before, held = run.state(), None
    with AtEdge(number) as edge:
        try:
            run.update(1)
        except KeyboardInterrupt as error:
            held = error
    made = run.accumulate.updates - 1
    try:
        assert edge.place, "premise: the place was reached"
        assert held is not None, "the interrupt was lost"
        if run.owned and not made:
            run.accumulate.discard()  # in case __exit__ had not started
        after = run.state()
        with torch.device("cpu"), torch.no_grad():
            active = active_modes()
            held = None
            gc.collect()
            assert active_modes() == active, "modes changed when the error was freed"
        assert torch.is_grad_enabled()
        assert not torch._C._is_view_replay_enabled()
        assert_unchanged(after, run.state())
        run.reseed()
        run.update(2)
        expected, following = undisturbed(mode, 1 + made)
        assert_unchanged(expected if made else before, after)
        assert_unchanged(following, run.state())
    except (AssertionError, SuperbatchError) as error:
        return f"call {number}, {edge.place}: {error}"
    return None


def sweep(mode: str, points: int | None) -> None:
    trained(mode, 2)  # fills the caches of the process
    counted = trained(mode, 1)
    with AtEdge(0) as edge:
        counted.update(1)
    assert edge.calls > 0, "premise: contexts were entered"
    numbers = range(1, edge.calls + 1, 1 if points is None else -(-edge.calls // points))
    wrong = [found for number in numbers if (found := wrong_at(mode, number))]
    assert not wrong, f"{len(wrong)} of {len(numbers)}:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("mode", ["sample_rng", "whole batch", "momentum"])
def test_interrupted_at_some_edges_of_contexts(mode: str) -> None:
    sweep(mode, POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_interrupted_at_every_edge_of_a_context(mode: str) -> None:
    sweep(mode, None)
