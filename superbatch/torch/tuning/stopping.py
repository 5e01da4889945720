"""Update from a window that ends when its gradient has little noise.

Such a window ends early if the noise happens to agree with the gradient, so the *mean* over the window is
biased: by 2 % of the signal for noise in 100 dimensions, by 50 % for noise in one. By Wald's identity
the *sum* is unbiased: ``E[sum of K gradients] = E[K] G`` for every rule that does not use future gradients.
So the sum is divided by a number that is fixed in advance, and a longer window makes a longer update. Adam
would undo that, because its step does not grow with the gradient.

Prefer `tuning.adaptive.Controller`, which decides from earlier windows and has no such bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from superbatch.batch.tree import count_samples
from superbatch.errors import InputError, NonFiniteError, OptimizerError
from superbatch.integers import positive_int
from superbatch.noise.meter import estimate
from superbatch.results.stopping import StoppedUpdate

from ..window.norm import norm_of
from ..window.participants import batchnorm as norms
from ..window.sync.find import find_sync


def update_until(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any], Tensor],
    microbatches: Iterator[Any],
    *,
    planned: float,
    target: float = 1.0,
    least: int = 4,
    most: int = 64,
    reduction: str = "sum",
    weight: Callable[[Any], float] = count_samples,
) -> StoppedUpdate:
    """Make one update from micro-batches until the ratio of noise to signal is small.

    After each micro-batch the ratio is estimated from those so far. The gradient of the update is the sum of
    their gradients divided by `planned`.

    Args:
        model: model with the optimizer's parameters.
        optimizer: `torch.optim.SGD`, with or without momentum.
        loss_fn: function from a micro-batch to its loss, *summed* over its samples.
        microbatches: iterator; unused micro-batches remain in it.
        planned: weight of an update, in samples, for which the learning rate was chosen.
        target: ratio of noise to signal at which to stop.
        least: smallest number of micro-batches; the estimate from fewer is unreliable.
        most: largest number of micro-batches.
        reduction: reduction of the loss: must be ``"sum"``.
        weight: function from a micro-batch to its weight; by default its number of samples.

    Returns:
        The record of the update.

    Raises:
        InputError: `reduction` is not ``"sum"``, another option is invalid, the model is on several ranks, or
            the iterator is empty.
        OptimizerError: the step of the optimizer does not grow with the gradient.
        NonFiniteError: a gradient is not finite; no update was made.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = iter(torch.randn(100, 8, 3))
        >>> done = update_until(model, optimizer, lambda x: model(x).square().sum(), data, planned=64)
        >>> done.factor == 8 * done.microbatches / 64, done.stopped
        (True, True)
    """
    # All arguments are checked before a micro-batch is taken from the iterator.
    _check(model, optimizer, reduction, planned, target)
    least, most = max(2, positive_int("least", least)), positive_int("most", most)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    sums = _Sums(parameters)
    stopped = False
    for microbatch in microbatches:
        sums.add(loss_fn(microbatch), float(weight(microbatch)))
        ratio = sums.ratio()
        # Not before `least`: an early ratio is mostly noise.
        stopped = sums.count >= least and ratio is not None and ratio <= target
        if stopped or sums.count >= most:
            break
    if not sums.count:
        raise InputError("The iterator has no micro-batches left. Make a new one with iter(loader).")
    # The norm of the sum is infinite or NaN if one element is.
    norm = norm_of(sums.gradients)
    if norm is None or not math.isfinite(float(norm)):
        raise NonFiniteError(
            "The gradient is not finite, or there is none, so no update was made. Check that loss_fn returns "
            "a finite loss with a graph."
        )
    # Divided by the planned weight, not by that of this window: so the update is unbiased.
    _update(optimizer, parameters, [None if g is None else g / planned for g in sums.gradients])
    return StoppedUpdate(
        loss=sums.loss / sums.weight,
        microbatches=sums.count,
        weight=sums.weight,
        factor=sums.weight / planned,
        ratio=sums.ratio(),
        stopped=stopped,
    )


class _Sums:
    """Sums over the micro-batches of the window so far."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self.gradients: list[Tensor | None] = [None] * len(parameters)
        self.count, self.weight, self.loss = 0, 0.0, 0.0
        self._squares = 0.0  # sum |n_i g_i|^2
        self._weights = 0.0  # sum n_i^2

    def add(self, loss: Tensor, weight: float) -> None:
        # grad(), not backward(), so that the user's .grad does not change.
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        norm = norm_of(gradients)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                old = self.gradients[index]
                # The first one is copied: autograd may give two parameters one tensor (that of ``a + b``), or
                # one whose elements share memory (that of ``a.sum()``), and neither can be added to in place.
                self.gradients[index] = gradient.clone() if old is None else old.add_(gradient)
        self.count += 1
        self.weight += weight
        self.loss += float(loss.detach())
        self._squares += 0.0 if norm is None else float(norm) ** 2
        self._weights += weight * weight

    def ratio(self) -> float | None:
        """Return the ratio of noise to signal of the mean; None if it cannot be estimated."""
        norm = norm_of(self.gradients)
        if self.count < 2 or norm is None or not self.weight:
            return None
        total = self.weight**2
        # With all the weight on one micro-batch there are no differences to measure noise.
        if self._weights >= total:
            return None
        estimated = estimate(self._squares / total, float(norm) ** 2 / total, self._weights / total)
        return estimated.variance / estimated.signal if estimated.signal > 0 else None


def _update(optimizer: Optimizer, parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        # Gradients are removed after an error too; otherwise the next backward would add to them.
        optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)


def _check(model: nn.Module, optimizer: Optimizer, reduction: str, planned: float, target: float) -> None:
    # The mean of a window that ends by its own noise is biased.
    if reduction != "sum":
        raise InputError(
            f"update_until() cannot have reduction={reduction!r}: the window ends early if noise agrees with "
            'the signal, so a mean over it is biased. Use reduction="sum" with a loss summed over samples, '
            "or choose the length of windows from earlier ones with superbatch.tuning.adaptive.Controller."
        )
    if not isinstance(optimizer, SGD):
        raise OptimizerError(
            f"The step of {type(optimizer).__name__} need not grow with the gradient, but update_until() is "
            "unbiased only if it does. Use torch.optim.SGD, or superbatch.tuning.adaptive.Controller."
        )
    for name, value in (("planned", planned), ("target", target)):
        if isinstance(value, bool) or not 0 < value < math.inf:
            raise InputError(f"{name}={value!r} is not a positive number. Pass a positive number.")
    if find_sync([model]).shared:
        raise InputError(
            "The model is on several ranks, which would end their windows at different lengths. Use "
            "superbatch.torch.tuning.controller, whose windows have equal length on all ranks."
        )
    # Ghost statistics would change with the length of the window.
    norms.refuse(norms.find_batchnorms([model]))
