"""SIGINT inside an update is deferred until its end; other threads and handlers are not affected."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from superbatch.errors import OptimizerError, WindowError
from superbatch.torch import Accumulator
from superbatch.torch.interrupts import DeferredInterrupts
from superbatch.torch.window import open_window
from tests.torch.helpers import mlp, mse, rows
from tests.torch.interrupted_windows import Run
from tests.torch.states import assert_unchanged


@pytest.fixture(autouse=True)
def same_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before


def interrupt(times: int = 1) -> None:
    """Send SIGINT as a terminal does, and wait for it."""
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass


def expected(mode: str, updates: int) -> dict[str, Any]:
    run = Run(mode)
    for number in range(updates):
        run.update(number)
    return run.state()


def interrupt_in_step(run: Run, where: str, patch: pytest.MonkeyPatch) -> list[str]:
    """Send SIGINT in the next step of the first optimizer; return the places of the signals sent."""
    sent: list[str] = []

    def send(*_: Any) -> None:
        if not sent:
            sent.append(where)
            interrupt()

    def then_send(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any, **kwargs: Any) -> None:
            compute(*args, **kwargs)
            send()

        return computed

    if where == "before the step":
        run.optimizers[0].register_step_pre_hook(send)
    elif where == "after the step":
        run.optimizers[0].register_step_post_hook(send)
    else:
        for compute in (adam, adamw, sgd):
            patch.setattr(sys.modules[compute.__module__], compute.__name__, then_send(compute))
    return sent


@pytest.mark.parametrize("where", ["before the step", "after a group", "after the step"])
@pytest.mark.parametrize("mode", ["adamw, two groups", "two optimizers", "momentum", "masters", "scaler"])
def test_an_interrupt_in_the_step_is_raised_after_the_update(
    mode: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(mode, 2)
    run = Run(mode)
    run.update(0)
    with monkeypatch.context() as patch:
        sent = interrupt_in_step(run, where, patch)
        with pytest.raises(KeyboardInterrupt):
            run.update(1)
    assert sent, "premise: it was sent"
    assert run.accumulate.updates == 2
    assert_unchanged(want, run.state())
    run.update(2)
    assert run.accumulate.updates == 3


@pytest.mark.parametrize("mode", ["adamw, two groups", "two optimizers"])
def test_mutant_without_deferral_tears_the_update(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next update raises, because this one is torn."""
    want = expected(mode, 2)
    run = Run(mode)
    run.update(0)
    before = run.state()
    with monkeypatch.context() as patch:
        patch.setattr(open_window, "DeferredInterrupts", nullcontext)
        assert interrupt_in_step(run, "after a group", patch) == []
        with pytest.raises(KeyboardInterrupt):
            run.update(1)
    for either in (before, want):
        with pytest.raises(AssertionError):
            assert_unchanged(either, run.state())
    with pytest.raises(OptimizerError, match="torn"):
        run.update(2)


def test_an_interrupt_by_a_timer() -> None:
    """The signal arrives while the step waits, and the update is kept."""
    run = Run("adamw, two groups")
    waited = threading.Event()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        waited.set()

    def wait(*_: Any) -> None:
        threading.Timer(0.01, kill).start()
        assert waited.wait(10)
        for _number in range(1000):
            pass

    handle = run.optimizers[0].register_step_pre_hook(wait)
    with pytest.raises(KeyboardInterrupt):
        run.update(0)
    handle.remove()
    assert run.accumulate.updates == 1
    assert_unchanged(expected("adamw, two groups", 1), run.state())


def test_two_interrupts_are_raised_once() -> None:
    run = Run("adamw, two groups")
    run.optimizers[0].register_step_pre_hook(lambda *_: interrupt(2))
    with pytest.raises(KeyboardInterrupt) as caught:
        run.update(0)
    assert caught.value.__context__ is None
    assert run.accumulate.updates == 1


def test_a_handler_of_the_program_is_called_after_the_update() -> None:
    run, calls = Run("adamw, two groups"), []

    def handler(number: int, frame: Any) -> None:
        calls.append((number, run.accumulate.updates))

    before = signal.signal(signal.SIGINT, handler)
    try:
        run.optimizers[0].register_step_pre_hook(lambda *_: interrupt())
        run.update(0)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [(signal.SIGINT, 1)]
    assert run.accumulate.updates == 1


def test_a_handler_that_the_step_sets_stays() -> None:
    def handler(*_: Any) -> None: ...

    before = signal.getsignal(signal.SIGINT)
    try:
        with DeferredInterrupts():
            signal.signal(signal.SIGINT, handler)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_of_the_system_stay(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferredInterrupts():
            assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_the_block_is_the_context_of_the_interrupt() -> None:
    def fails() -> None:
        with DeferredInterrupts():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as caught:
        fails()
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_nested_contexts() -> None:
    done = []

    def nested() -> None:
        with DeferredInterrupts():
            with DeferredInterrupts():
                interrupt()
            done.append("the outer block continues")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done


def test_an_update_in_another_thread_keeps_the_handler() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    run = Run("adamw, two groups")
    run.optimizers[0].register_step_pre_hook(lambda *_: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=run.update, args=(0,))
    thread.start()
    thread.join()
    assert seen == [before]
    assert run.accumulate.updates == 1


def test_the_loop_over_micro_batches_stays_interruptible() -> None:
    run = Run("owned")
    run.update(0)
    before = run.state()

    accumulate = run.accumulate
    assert isinstance(accumulate, Accumulator)

    def loop() -> None:
        with accumulate.window(torch.ones(7, 4).double()) as window:
            for microbatch in window:
                window.backward(run.model(microbatch).square().mean())
                interrupt()

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert_unchanged(before, run.state())


def test_a_window_without_exit_can_be_discarded() -> None:
    """An interrupt between the user's block and `__exit__` runs no code of the library."""
    run = Run("owned")
    run.update(0)
    before = run.state()
    assert isinstance(run.accumulate, Accumulator)
    window = run.accumulate.window(torch.ones(7, 4).double())
    window.__enter__()
    for microbatch in window:
        window.backward(run.model(microbatch).square().mean())
        break
    with pytest.raises(WindowError, match=r"call discard\(\)"):
        run.update(1)
    run.accumulate.discard()
    assert_unchanged(before, run.state())
    window.__exit__(None, None, None)
    run.update(1)
    assert_unchanged(expected("owned", 2), run.state())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_checkpoint_on_a_cluster_signal_has_the_complete_update(number: signal.Signals) -> None:
    """The signal arrives inside the optimizer's step, and its handler runs after the window."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=2, check=False)
    saved: list[tuple[dict[str, Any], float]] = []

    def save(*_: object) -> None:
        saved.append((accumulate.state_dict(), float(next(model.parameters()).detach().sum())))

    before = signal.signal(number, save)
    handle = optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(number))
    try:
        assert accumulate(rows(6)[0]).made
        assert signal.getsignal(number) is save
    finally:
        handle.remove()
        signal.signal(number, before)
    ((state, total),) = saved
    assert state["updates"] == 1 and state["window"] is None
    assert total == float(next(model.parameters()).detach().sum())
