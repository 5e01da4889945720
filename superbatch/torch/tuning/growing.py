"""Growing batches on the user's own torch scheduler and optimizer (see `superbatch.tuning.growing`)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from superbatch.errors import InputError
from superbatch.integers import positive_int
from superbatch.tuning.growing import GrowingBatch

from .scaling import change_betas, schedulers_of, set_number


def rate_of(
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler], *, samples_per_step: int
) -> Callable[[float], float]:
    """Return the rate factor of a torch scheduler as a function of the samples seen.

    A copy of the scheduler is stepped on a temporary optimizer as far as needed; the scheduler and its
    optimizer do not change.

    Args:
        scheduler: new scheduler that was not stepped yet, or a function that creates one for an optimizer.
        samples_per_step: samples between two steps of the scheduler: those of one update, or those of an
            epoch if it is stepped once per epoch.

    Returns:
        Function from samples to the rate relative to the optimizer's rate (its ``initial_lr``). After the end
        of the schedule it returns the last value.

    Raises:
        InputError: the rate depends on more than the number of steps, the scheduler was stepped already, or
            groups have different factors.

    Examples:
        >>> def halving(optimizer):
        ...     return torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.5)
        >>> factor = rate_of(halving, samples_per_step=1000)  # epochs of 1000 samples
        >>> factor(0), factor(29_999), factor(30_000)
        (1.0, 1.0, 0.5)
    """
    return _Simulated(_copied(scheduler), positive_int("samples_per_step", samples_per_step))


class GrowBatch:
    """Schedule of a growing batch: accumulation steps of each window, and the learning rate.

    Pass it to `windows` as the accumulation steps, and to the Accumulator as its scheduler. Adam's beta2 is
    changed with the batch, so that its half-life in samples stays constant.

    Rates depend on the number of updates, accumulation steps on the number of windows. After a window without
    an update the two differ by one, until `windows` is called with ``first_update=accumulate.updates`` again,
    e.g. at the start of an epoch.

    Args:
        optimizer: the optimizer; its rate (``initial_lr`` if it has a scheduler) corresponds to the factor 1.
        schedule: result of `superbatch.tuning.growing.grow_batch`.

    Raises:
        InputError: the schedule was made with a ``temperature=`` that does not belong to this optimizer, or
            it changes momentum for an optimizer without momentum.

    Examples:
        >>> from superbatch.tuning.growing import grow_batch
        >>> from superbatch.torch import Accumulator, windows
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> grow = GrowBatch(optimizer, grow_batch(lambda seen: 0.5 ** (seen // 64), batch=8, microbatch=8))
        >>> accumulate = Accumulator(model, optimizer, lambda x: model(x).square().mean(), scheduler=grow)
        >>> [accumulate(window).samples for window in windows(torch.randn(24, 8, 3), grow)]
        [8, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32]
    """

    def __init__(self, optimizer: Optimizer, schedule: GrowingBatch) -> None:
        _require_temperature(optimizer, schedule.temperature_of)
        self._optimizer, self._schedule, self._update = optimizer, schedule, 0
        groups = optimizer.param_groups
        # initial_lr, because a scheduler may have changed lr already.
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self._betas = [float(group["betas"][1]) if "betas" in group else None for group in groups]
        if schedule.momentum is not None:
            self._set_momentum(schedule.momentum)
        self._apply()

    def __call__(self, update: int) -> int:
        """Return the accumulation steps of an update."""
        return self._schedule(update)

    def step(self) -> None:
        """Set the rate and betas of the next update; the Accumulator calls this after each update."""
        self._update += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: the index of the next update, and the unscaled rates and beta2."""
        return {"update": self._update, "rates": list(self._rates), "beta2": list(self._betas)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the optimizer's own state must be loaded too.

        Args:
            state: from `state_dict`.
        """
        self._update, self._rates = int(state["update"]), list(state["rates"])
        self._betas = list(state["beta2"])
        self._apply()

    def _apply(self) -> None:
        rate = self._schedule.rate(self._update)
        groups = self._optimizer.param_groups
        for group, base, beta2 in zip(groups, self._rates, self._betas, strict=True):
            # From the value at the factor 1, not from the last rate, so that rounding does not accumulate.
            set_number(group, "lr", base * rate)
            if beta2 is None:
                continue
            new = self._schedule.beta2(beta2, self._update)
            # Only if it changes, which is rare, because a change scales the state too.
            if new != float(group["betas"][1]):
                for change in change_betas(self._optimizer, group, beta1=float(group["betas"][0]), beta2=new):
                    change()

    def _set_momentum(self, momentum: float) -> None:
        # All groups are checked before one is changed.
        for group in self._optimizer.param_groups:
            if "momentum" not in group:
                raise InputError(
                    f"The schedule changes momentum (to {momentum}), but {type(self._optimizer).__name__} "
                    "has none. Leave momentum= out of grow_batch(), or train with SGD."
                )
        for group in self._optimizer.param_groups:
            group["momentum"] = momentum


def _require_temperature(optimizer: Optimizer, temperature: str) -> None:
    # AdamW is no subclass of Adam in older releases of torch.
    for kinds, name, law in (
        ((Adam, AdamW), "adam", "Adam divides by the noise: its temperature is lr / sqrt(B)"),
        ((SGD,), "sgd", "the temperature of SGD is lr / B"),
    ):
        if isinstance(optimizer, kinds) and temperature != name:
            raise InputError(
                f'The schedule has temperature="{temperature}", but {law}. Make it for '
                f'{type(optimizer).__name__} with grow_batch(..., temperature="{name}").'
            )


class _Simulated:
    """Rates of a scheduler by steps, simulated as far as needed."""

    def __init__(self, scheduler: LRScheduler, samples_per_step: int) -> None:
        self._scheduler, self._samples = scheduler, samples_per_step
        # Schedulers write initial_lr when they are made.
        self._bases = [float(group["initial_lr"]) for group in scheduler.optimizer.param_groups]
        self._factors = [self._factor()]
        self._over = False

    def __call__(self, samples: float) -> float:
        step = int(samples // self._samples)
        # Each step is simulated once, when it is first needed.
        while len(self._factors) <= step and not self._over:
            self._advance()
        return self._factors[min(step, len(self._factors) - 1)]

    def _advance(self) -> None:
        with warnings.catch_warnings():
            # Schedulers warn because the temporary optimizer is never stepped.
            warnings.simplefilter("ignore")
            try:
                self._scheduler.step()
            except ValueError:  # OneCycleLR raises it at its end
                self._over = True
                return
        self._factors.append(self._factor())

    def _factor(self) -> float:
        groups = self._scheduler.optimizer.param_groups
        factors = [
            float(group["lr"]) / base if base else 0.0
            for group, base in zip(groups, self._bases, strict=True)
        ]
        # Relative: rates of 1e-6 differ by less than 1e-9 in any case.
        if max(factors) - min(factors) > 1e-9 * max(map(abs, factors)):
            raise InputError(
                f"The scheduler multiplies the rates of parameter groups by different factors ({factors}), "
                "but all groups have the same batch. Pass a scheduler with one factor for all groups."
            )
        return factors[0]


def _copied(scheduler: Any) -> LRScheduler:
    """Return a copy of a new scheduler, on a temporary optimizer with parameters of one element."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputError(
            "The rate of a ReduceLROnPlateau depends on future losses, so it cannot be simulated. Pass a "
            "scheduler whose rate depends only on the number of its steps."
        )
    if not isinstance(scheduler, LRScheduler):
        if not callable(scheduler):
            raise InputError(
                f"A scheduler of type {type(scheduler).__name__} cannot be simulated. Pass a torch scheduler "
                "or a function from an optimizer to a torch scheduler."
            )
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        return _copied(scheduler(optimizer))
    # A ChainedScheduler has no counter of its own.
    stepped = max(getattr(each, "last_epoch", 0) for each in schedulers_of(scheduler))
    if stepped > 0:
        raise InputError(
            f"The scheduler has made {stepped} steps already, but the batch grows from the start of the "
            "schedule. Pass a new scheduler."
        )
    # Parameters of one element: the copy needs groups, not weights.
    groups = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(1))]}
        for group in scheduler.optimizer.param_groups
    ]
    temporary = torch.optim.SGD(groups, lr=0.0)
    # In the copy, the temporary optimizer replaces the user's one, also in nested schedulers; parameters and
    # states of the user are not copied.
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): temporary})
