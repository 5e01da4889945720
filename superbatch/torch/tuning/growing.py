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
    """Read the factor of the rate that a torch scheduler sets, as a function of the samples seen.

    A copy of the scheduler is stepped on a throwaway optimizer, as far as is asked: the scheduler and its
    optimizer stay what they are.

    Args:
        scheduler: new, not stepped yet; or a function that makes it for an optimizer.
        samples_per_step: samples between two steps of it: those of one update where it is stepped after each,
            those of an epoch where it is stepped after each epoch.

    Returns:
        samples -> rate over the optimizer's rate (its ``initial_lr``). Where the scheduler has come to its
        end, the last value.

    Raises:
        InputError: its rate depends on more than the number of steps, or differs between groups.

    Examples:
        >>> def halving(optimizer):
        ...     return torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.5)
        >>> factor = rate_of(halving, samples_per_step=1000)  # epochs of 1000 samples
        >>> factor(0), factor(29_999), factor(30_000)
        (1.0, 1.0, 0.5)
    """
    return _Simulated(_throwaway(scheduler), positive_int("samples_per_step", samples_per_step))


class GrowBatch:
    """Trains with a batch that grows: the accumulation steps of each window, and the rate that goes with it.

    Pass it to `windows` as the accumulation steps, and to the Accumulator as its scheduler. Adam's beta2
    follows the batch too, and keeps its half-life in samples.

    Rates go by updates that were made, lengths by windows: after a window that made no update they are one
    apart until `windows` gets ``first_update=accumulate.updates`` again, as at the start of an epoch.

    Args:
        optimizer: its rate (``initial_lr`` where a scheduler was made with it) is the schedule's 1.
        schedule: from `superbatch.tuning.growing.grow_batch`.

    Raises:
        InputError: the schedule's temperature is not that of the optimizer.

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
        # initial_lr where a scheduler has changed lr already.
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self._betas = [float(group["betas"][1]) if "betas" in group else None for group in groups]
        if schedule.momentum is not None:
            self._set_momentum(schedule.momentum)
        self._apply()

    def __call__(self, update: int) -> int:
        """Return the accumulation steps of an update."""
        return self._schedule(update)

    def step(self) -> None:
        """Set what the next update is made with; called by the Accumulator after each one."""
        self._update += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: the number of the next update, and the base of the factors."""
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
            # From the base and not from the last rate: rounding does not add up.
            set_number(group, "lr", base * rate)
            if beta2 is None:
                continue
            new = self._schedule.beta2(beta2, self._update)
            # Unchanged in most updates: the state is left alone.
            if new != float(group["betas"][1]):
                for change in change_betas(self._optimizer, group, beta1=float(group["betas"][0]), beta2=new):
                    change()

    def _set_momentum(self, momentum: float) -> None:
        # All groups are checked before one is changed.
        for group in self._optimizer.param_groups:
            if "momentum" not in group:
                raise InputError(
                    f"The schedule is for momentum {momentum}, and {type(self._optimizer).__name__} has none "
                    "to change. Leave momentum= out, or train with SGD."
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
                f'A schedule with temperature="{temperature}" does not fit {type(optimizer).__name__}: '
                f'{law}. Make it with grow_batch(..., temperature="{name}").'
            )


class _Simulated:
    """The rates of a scheduler over its steps, simulated as far as is asked."""

    def __init__(self, scheduler: LRScheduler, samples_per_step: int) -> None:
        self._scheduler, self._samples = scheduler, samples_per_step
        # Schedulers write initial_lr when they are made.
        self._bases = [float(group["initial_lr"]) for group in scheduler.optimizer.param_groups]
        self._factors = [self._factor()]
        self._over = False

    def __call__(self, samples: float) -> float:
        step = int(samples // self._samples)
        # As far as is asked, and each step once: schedules ask for rising samples.
        while len(self._factors) <= step and not self._over:
            self._advance()
        return self._factors[min(step, len(self._factors) - 1)]

    def _advance(self) -> None:
        with warnings.catch_warnings():
            # The throwaway optimizer is never stepped, which schedulers warn of.
            warnings.simplefilter("ignore")
            try:
                self._scheduler.step()
            except ValueError:  # how OneCycleLR says that it is over
                self._over = True
                return
        self._factors.append(self._factor())

    def _factor(self) -> float:
        groups = self._scheduler.optimizer.param_groups
        found = [
            float(group["lr"]) / base if base else 0.0
            for group, base in zip(groups, self._bases, strict=True)
        ]
        # Relative: rates of 1e-6 differ by less than 1e-9 in rounding alone.
        if max(found) - min(found) > 1e-9 * max(map(abs, found)):
            raise InputError(
                f"The scheduler multiplies the rates of groups by {found}, and there is one batch for all of "
                "them. Give one factor, as a function of the samples seen."
            )
        return found[0]


def _throwaway(scheduler: Any) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputError(
            "The rate of a ReduceLROnPlateau depends on losses that are not known beforehand. Pass a "
            "scheduler that depends on the number of its steps alone."
        )
    if not isinstance(scheduler, LRScheduler):
        if not callable(scheduler):
            raise InputError(
                f"A scheduler of type {type(scheduler).__name__} cannot be simulated. Pass a torch "
                "scheduler, or a function that makes one for an optimizer."
            )
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        return _throwaway(scheduler(optimizer))
    # A ChainedScheduler counts nothing itself.
    stepped = max(getattr(each, "last_epoch", 0) for each in schedulers_of(scheduler))
    if stepped > 0:
        raise InputError(
            f"The scheduler has made {stepped} steps, and the batch grows from the start of the schedule. "
            "Pass a new one."
        )
    # Parameters of one element: the copy needs groups, not weights.
    groups = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(1))]}
        for group in scheduler.optimizer.param_groups
    ]
    throwaway = torch.optim.SGD(groups, lr=0.0)
    # The copy's optimizer is the throwaway one, wherever the scheduler (or one inside it) holds it; neither
    # the user's parameters nor their state are copied.
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): throwaway})
