"""Adaptive batches and AdaScale on a torch optimizer (see `superbatch.tuning`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from superbatch.errors import InputError
from superbatch.results.noise import Noise
from superbatch.tuning.adaptive import Controller
from superbatch.tuning.adascale import AdaScale
from superbatch.tuning.scaling import Rule

from ..window.sync.find import find_sync
from ..window.sync.sync import Sync
from .scaling import rescale, set_number


def controller(
    model: nn.Module,
    noise: Callable[[], Noise | None],
    *,
    microbatch: int,
    start: int,
    target: float = 1.0,
    least: int = 1,
    most: int | None = None,
) -> Controller:
    """Make a `superbatch.tuning.adaptive.Controller` whose windows have equal length on all ranks of a model.

    Rank 0 decides, and all ranks must call the controller equally often. So each rank needs data for the same
    number of windows: equal shards, as `DistributedSampler` makes them.

    Args:
        model: the model, in DistributedDataParallel if there are several ranks.
        noise: function that returns the current noise estimate, such as ``lambda: accumulate.noise``.
        microbatch: samples of one micro-batch *on one rank*.
        start: accumulation steps of the first window.
        target: ratio of noise to signal to aim at.
        least: smallest number of accumulation steps.
        most: largest number of accumulation steps; None for no limit.

    Returns:
        The controller; pass it to `windows`.

    Examples:
        >>> steps = controller(nn.Linear(2, 1), lambda: None, microbatch=8, start=4)
        >>> steps(0), steps(1)  # without an estimate the steps stay
        (4, 4)
    """
    # The ranks of DDP, because all of them must open windows of equal length.
    sync: Sync = find_sync([model])
    return Controller(
        noise,
        # On all ranks: the noise scale is in samples of the effective batch.
        microbatch=microbatch * sync.count,
        start=start,
        target=target,
        least=least,
        most=most,
        # Rank 0 decides, because rounding of the measured noise differs between ranks.
        first=sync.first,
    )


class AdaptiveBatch:
    """Scale an optimizer's settings whenever a controller changes the batch.

    A `Controller` alone does not change the learning rate: a larger batch then lowers the noise, as a decay
    of the rate would. `AdaptiveBatch` scales the settings when the batch changes, before the window's update.

    Args:
        optimizer: optimizer that `rescale` scales.
        steps: the controller, or another schedule of accumulation steps.
        rule: ``"linear"``, ``"sqrt"``, ``"power"`` or ``"keep"``; for ``"gain"`` see `AdaScaleRate`.
        scheduler: scheduler of the optimizer's rate; None if there is none.

    Raises:
        InputError: the rule is ``"gain"``, which depends on the noise.

    Examples:
        >>> import torch
        >>> from superbatch import piecewise
        >>> optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
        >>> steps = AdaptiveBatch(optimizer, piecewise({0: 2, 1: 4}), rule="linear")
        >>> steps(0), optimizer.param_groups[0]["lr"], steps(1), optimizer.param_groups[0]["lr"]
        (2, 0.1, 4, 0.2)
    """

    def __init__(
        self, optimizer: Optimizer, steps: Callable[[int], int], *, rule: Rule, scheduler: Any = None
    ) -> None:
        if rule == "gain":
            raise InputError(
                'rule="gain" would accumulate errors in the rate, because the noise changes between two '
                "changes of the batch. Use AdaScaleRate, whose gain is relative to a fixed base batch."
            )
        self._optimizer, self._steps, self._scheduler = optimizer, steps, scheduler
        self._rule: Rule = rule
        self._last: int | None = None

    def __call__(self, update: int) -> int:
        """Return the accumulation steps of an update, and scale the optimizer to them."""
        steps = self._steps(update)
        # Not at the first call: the optimizer's settings are meant for the first batch.
        if self._last is not None and steps != self._last:
            rescale(self._optimizer, self._last, steps, rule=self._rule, scheduler=self._scheduler)
        self._last = steps
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: the steps to which the optimizer is scaled."""
        return {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; load the states of the controller and the optimizer separately."""
        self._last = state["last"]


class AdaScaleRate:
    """Set an optimizer's rate by AdaScale, ``gain x lr0(tau)``: a scheduler for the Accumulator.

    For Adam the rate is scaled by the square root of the gain; the progress tau grows by the gain itself.

    Args:
        optimizer: the optimizer; its rates are lr0 at a factor of 1.
        factor: factor of the rate as a function of tau, the number of updates with the base batch; such as
            ``lambda tau: 0.5 ** (tau // 1000)``.
        base_batch: samples of one update, on all ranks, for which the rate and `factor` are meant.
        batch: samples of each update, on all ranks: a number, or a function of the update's index.
        noise: function that returns the current noise estimate, such as ``meter.estimate`` of a `NoiseMeter`
            that is passed to the Accumulator as ``observers=[meter]``. It is first called in this
            constructor, before the Accumulator exists.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
        >>> rate = AdaScaleRate(optimizer, lambda tau: 1.0, base_batch=32, batch=128, noise=lambda: 96.0)
        >>> round(optimizer.param_groups[0]["lr"], 3), rate.progress
        (0.229, 0.0)
        >>> rate.step()
        >>> round(rate.progress, 3)
        2.286
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Callable[[float], float],
        *,
        base_batch: float,
        batch: float | Callable[[int], float],
        noise: Callable[[], Noise | float | None],
    ) -> None:
        self._optimizer, self._noise = optimizer, noise
        self._batch = batch if callable(batch) else lambda update: batch
        # initial_lr, because a scheduler may have changed lr already.
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        adam = isinstance(optimizer, Adam | AdamW)  # no subclass of Adam in older releases
        # Adam's step does not grow with the gradient, so its rate is scaled by the root of the gain.
        self._adascale = AdaScale(factor, base_batch, power=0.5 if adam else 1.0)
        self._update = 0
        # The gain applies from the first update on.
        self._apply()

    @property
    def progress(self) -> float:
        """Return tau, the progress so far in updates with the base batch."""
        return self._adascale.progress

    @property
    def gain(self) -> float:
        """Return the gain of the next update."""
        return self._adascale.gain

    def step(self) -> None:
        """Advance tau by an update, and set the rate of the next one; the Accumulator calls this."""
        # First, because the rate belongs to the tau of the next update.
        self._adascale.advance()
        self._update += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"update": self._update, "rates": list(self._rates), "adascale": self._adascale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; load the optimizer's state too, which has the rate of the next update.

        Args:
            state: result of `state_dict`.
        """
        self._update, self._rates = int(state["update"]), list(state["rates"])
        self._adascale.load_state_dict(state["adascale"])

    def _apply(self) -> None:
        factor = self._adascale.rate(self._batch(self._update), self._noise())
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            # In place if the rate is a tensor, because a captured graph reads that tensor.
            set_number(group, "lr", rate * factor)
