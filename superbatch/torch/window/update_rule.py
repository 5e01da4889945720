"""The end of a window, in the one order that is right; each function is one part of it.

reduce -> normalise -> unscale -> finite check -> clip -> optimizer -> scaler -> scheduler -> zero_grad

Once per window: a norm of a gradient that is not normalised, not unscaled or not reduced is the norm of
something else, and a scheduler counts updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from superbatch.errors import OptimizerError, explain

from .. import fastpaths
from ..devices import local_part
from .before_step import BeforeStep, not_made
from .norm import elements_of
from .participants.gradient_sum import GradientSum, ManagedParameter, clear, values
from .participants.momentum_gradients import MomentumGradientSum
from .sync.sync import Sync
from .wrapped import reaches

Clip = Callable[[Sequence[Tensor]], None]


@dataclass(frozen=True)
class UpdateRule:
    """Optimizers, schedulers, scaler and limits of an update.

    Attributes:
        optimizers: stepped in this order.
        schedulers: stepped after an update was made, once each.
        scaler: a `torch.amp.GradScaler`, or None.
        max_grad_norm: the largest 2-norm of the normalised gradient, or None.
        clip: changes the elements of the gradients in place, after that; or None.
        masters_copied: whether targets are copies that the parameters must be set to after an update.
        scaling: whether losses are scaled, so that an overflow is an ordinary event.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: Any | None
    max_grad_norm: float | None
    clip: Clip | None
    masters_copied: bool
    scaling: bool = False


def ready(
    rule: UpdateRule, gradient_sum: GradientSum, sync: Sync, owned: list[ManagedParameter], divisor: float
) -> list[Tensor | None]:
    """Reduce, normalise, unscale: return the gradient of the batch, one tensor (or None) per parameter."""
    gradients = sync.reduce(gradient_sum.close(), [entry.parameter for entry in owned], gradient_sum.zeros)
    if divisor != 1.0:
        present = [gradient for gradient in gradients if gradient is not None]
        if present:
            fastpaths.divide(list(map(local_part, present)), divisor)
    _require_any(gradient_sum, gradients)
    if rule.scaling:
        # unscale_ works on `.grad` and remembers an overflow for the scaler's own step().
        assert rule.scaler is not None
        gradient_sum.attach(gradients)
        for optimizer in _with_gradient(rule.optimizers):
            rule.scaler.unscale_(optimizer)
        gradients = [entry.target.grad for entry in owned]
    # A sparse gradient's norm is that of its summed values, and only those can be clipped in place.
    return [
        gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
        for gradient in gradients
    ]


def clip(rule: UpdateRule, gradients: list[Tensor | None], norm: float) -> None:
    """Clip the normalised gradient in place, by norm and then by the user's function."""
    # Unlike torch's function this leaves out the pass over all gradients when it would multiply by one.
    if rule.max_grad_norm is not None and norm + 1e-6 > rule.max_grad_norm:
        factor = rule.max_grad_norm / (norm + 1e-6)
        fastpaths.multiply(elements_of(gradients), factor)
    if rule.clip is not None:
        rule.clip([values(each) if each.is_sparse else each for each in gradients if each is not None])


def update(
    rule: UpdateRule,
    gradient_sum: GradientSum,
    owned: list[ManagedParameter],
    gradients: list[Tensor | None],
    before: BeforeStep,
) -> str | None:
    """Make the update: optimizer, scaler, master copies; return why it was not made, None if it was."""
    before.begin()
    if isinstance(gradient_sum, MomentumGradientSum):
        gradient_sum.apply()
    gradient_sum.attach(gradients)
    try:
        if rule.scaling:
            idle = _scaled_step(rule)
        else:
            # After momentum accumulation no target has a gradient: this runs the optimizer's hooks and
            # counters.
            idle = [each for each in rule.optimizers if not (_steps(each) or reaches(each, each.step))]
    finally:  # a hook may fail after the step
        # Where autocast encloses the whole training loop, it would continue with copies of the parameters as
        # they were.
        torch.clear_autocast_cache()
        if rule.masters_copied:
            _copy_masters(owned)
    return not_made(idle, before, len(rule.optimizers)) if idle else None


def _steps(optimizer: torch.optim.Optimizer) -> bool:
    """Step one of torch's own optimizers, which leaves out nothing; return whether it is one."""
    if not type(optimizer).__module__.startswith("torch.optim.") or "step" in vars(optimizer):
        return False
    optimizer.step()
    return True


def _copy_masters(owned: list[ManagedParameter]) -> None:
    with torch.no_grad():
        for entry in owned:
            if entry.target is not entry.parameter:
                entry.parameter.copy_(entry.target)


def advance(rule: UpdateRule, loss: float) -> None:
    """Step the schedulers: they count updates that were made."""
    for scheduler in rule.schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()


def zero_grad(owned: list[ManagedParameter], until_next: list[Tensor]) -> None:
    """Set the gradients to None; on the CPU their memory is kept until the next window.

    Freed here it would go back to the operating system, and the next window would pay for each page of it
    again: 3 % of a window of a small transformer. On an accelerator torch's allocator keeps it.
    """
    if owned[0].target.device.type == "cpu":
        until_next[:] = [gradient for entry in owned if (gradient := entry.target.grad) is not None]
    clear(owned)


def overflow(rule: UpdateRule, owned: list[ManagedParameter]) -> str:
    """Lower the scaler's scale after an overflow; no optimizer steps, not even one without an infinity.

    Returns:
        Why no update was made.
    """
    assert rule.scaler is not None
    rule.scaler.update()  # unscale_ has told it of each optimizer
    clear(owned)
    return "overflow: the gradient of the scaled loss is not finite"


def _scaled_step(rule: UpdateRule) -> list[torch.optim.Optimizer]:
    assert rule.scaler is not None
    idle = [
        optimizer
        for optimizer in _with_gradient(rule.optimizers)
        if not reaches(optimizer, partial(rule.scaler.step, optimizer), always=True)
    ]
    rule.scaler.update()
    return idle


def _with_gradient(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers that have a gradient: a scaler refuses one that has none."""
    return [
        optimizer
        for optimizer in optimizers
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    ]


def _require_any(gradient_sum: GradientSum, gradients: Sequence[Tensor | None]) -> None:
    if not isinstance(gradient_sum, MomentumGradientSum) and set(map(type, gradients)) <= {NoneType}:
        raise OptimizerError(
            explain(
                "a window whose losses gave no gradient to any parameter of the optimizer",
                "an update would change nothing",
                "check that the loss depends on the parameters that the optimizer was made with",
            )
        )


def learning_rates(rule: UpdateRule) -> tuple[float, ...]:
    """Return the learning rate of each parameter group of each optimizer."""
    return tuple([float(group["lr"]) for o in rule.optimizers for group in o.param_groups if "lr" in group])
