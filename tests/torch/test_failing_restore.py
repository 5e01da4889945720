"""If restoring one participant fails, all other state is restored nevertheless."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.window.participants import (
    batchnorm,
    forward_state,
    forward_state_keeper,
    loss_scale,
    parameter_gradients,
    snapshot,
)
from superbatch.torch.window.progress import Progress
from tests.torch.helpers import mse
from tests.torch.interrupted_windows import BATCHES, Model, Run
from tests.torch.states import assert_unchanged, fingerprint

PARTICIPANTS: dict[str, type] = {
    "random": snapshot.RandomKeeper,
    "state": forward_state.ForwardState,
    "norms": batchnorm.Pooled,
    "scale": loss_scale.LossScale,
    "sums": parameter_gradients.ParameterGradientSum,
    "position": Progress,
}
NO_MEMORY = "CUDA out of memory."


class Failing:
    """Replaces a method by one that raises in its first calls, before or after its work."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        owner: type,
        method: str,
        error: Exception,
        *,
        works: bool,
        times: int,
    ) -> None:
        self.calls, original = 0, getattr(owner, method)

        def failing(this: Any) -> Any:
            self.calls += 1
            result = original(this) if works or self.calls > times else None
            if self.calls <= times:
                raise error
            return result

        patch.setattr(owner, method, failing)


@pytest.mark.parametrize("windows", [0, 1])
@pytest.mark.parametrize("how", ["an error", "no memory"])
@pytest.mark.parametrize("which", list(PARTICIPANTS))
def test_a_participant_that_cannot_be_restored(
    which: str, how: str, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError is raised after the work of restore(), and an out-of-memory error once before it."""
    run = Run("scaler")
    for number in range(windows):
        run.update(number)
    before, calls = run.state(), [0]
    forward = run.model.forward

    def breaks(x: Tensor) -> Tensor:
        calls[0] += 1
        found = forward(x)
        if calls[0] == 2:
            raise ZeroDivisionError
        return found

    with monkeypatch.context() as patch:
        patch.setattr(run.model, "forward", breaks, raising=False)
        memory = how == "no memory"
        error = torch.OutOfMemoryError(NO_MEMORY) if memory else ValueError("cannot")
        failing = Failing(patch, PARTICIPANTS[which], "restore", error, works=not memory, times=1)
        with pytest.raises(ZeroDivisionError if memory else ValueError):
            run.update(windows)
    vars(run.model).pop("forward", None)
    assert failing.calls >= 1, "premise: restore() was called"
    assert_unchanged(before, run.state())
    run.update(windows)
    assert run.accumulate.updates == windows + 1


def trained(
    *, coupled: bool = False, **options: Any
) -> tuple[Model, Any, Accumulator | WholeBatch, list[int]]:
    """Return a training after one update; memory runs out in the call of the loss given by `calls[1]`."""
    torch.manual_seed(0)
    model = Model(norm=coupled, draws=not coupled, counts=coupled).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    calls = [0, 0]

    def loss_fn(batch: Any) -> Tensor:
        calls[0] += 1
        loss = mse(model, batch)
        if calls[0] == calls[1]:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return loss

    if coupled:
        accumulate = WholeBatch(model, optimizer, loss_fn, **options)
    else:
        accumulate = Accumulator(model, optimizer, loss_fn, check=False, **options)
    accumulate(BATCHES[0])
    return model, optimizer, accumulate, calls


@pytest.mark.parametrize("method", ["rollback", "restart"])
@pytest.mark.parametrize("which", ["random", "state", "scale", "sums", "position"])
def test_a_failing_rollback(which: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: Any = {"scaler": torch.amp.GradScaler("cpu", init_scale=4.0)} if which == "scale" else {}
    model, optimizer, accumulate, calls = trained(microbatch_size="auto", **scaled)
    calls[:] = [0, 1]
    before = fingerprint(model, optimizer)
    before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in before.items()}
    with monkeypatch.context() as patch:
        error = ValueError("cannot")
        failing = Failing(patch, PARTICIPANTS[which], method, error, works=False, times=1)
        if method == "restart":
            patch.setattr(Progress, "rollback", lambda self: False)
        with pytest.raises(ValueError, match="cannot"):
            accumulate(BATCHES[1])
    assert failing.calls == 1, "premise: it was called"
    assert_unchanged(before, fingerprint(model, optimizer))
    assert accumulate(BATCHES[1]).made


def test_a_failing_restore_with_coupled_samples_restores_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`num_batches_tracked` must not count the failed window."""
    model, optimizer, accumulate, _ = trained(coupled=True, microbatch_size=4)
    before = fingerprint(model, optimizer)
    before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in before.items()}
    with monkeypatch.context() as patch:
        recorded = Failing(
            patch,
            parameter_gradients.ParameterGradientSum,
            "record",
            torch.OutOfMemoryError(NO_MEMORY),
            works=True,
            times=1,
        )
        failing = Failing(
            patch,
            forward_state_keeper.ForwardStateKeeper,
            "restore",
            ValueError("cannot"),
            works=False,
            times=1,
        )
        with pytest.raises(ValueError, match="cannot"):
            accumulate(BATCHES[1])
    assert recorded.calls == 1 and failing.calls == 2, "premise: in recovery and at the end of the window"
    assert model.norm.num_batches_tracked == 1
    assert_unchanged(before, fingerprint(model, optimizer))
    assert accumulate(BATCHES[1]).made
