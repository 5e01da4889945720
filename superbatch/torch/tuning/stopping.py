"""A window that ends when its gradient is good enough: unbiased only as a sum.

Whoever stops once a gradient looks good, stops early when the noise happens to agree with it. The *mean* over
such a window is biased: by 2 % of the signal where the noise has 100 directions, by half of it where it has
one. By Wald's identity the *sum* is not: ``E[sum of K gradients] = E[K] G`` for every rule that does not look
ahead. So the sum is divided by a number that was fixed before, and a longer window makes a longer update. An
optimizer that forgets the length of a gradient (Adam) would undo that.

Prefer `tuning.adaptive.Controller`, which decides from windows that are past and needs none of this.
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
    """Make one update from as many micro-batches as it takes to have little noise.

    After each micro-batch noise over signal is estimated from those seen. The update is made with the sum of
    their gradients over `planned`.

    Args:
        model: whose parameters the optimizer has.
        optimizer: `torch.optim.SGD`, with or without momentum.
        loss_fn: micro-batch -> its loss, *summed* over its samples.
        microbatches: an iterator; what is not needed stays in it.
        planned: the weight, in samples, that the learning rate is for.
        target: noise over signal at which to stop.
        least: micro-batches at least; the estimate of fewer says little.
        most: micro-batches at most.
        reduction: what `loss_fn` returns, and what the update is made of: a sum.
        weight: how much a micro-batch counts; its samples.

    Returns:
        The record of the update.

    Raises:
        InputError: a mean was asked for, which is biased; an option cannot be used; no data were left.
        OptimizerError: the optimizer forgets the length of a gradient.
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
    # Everything that can be refused is, before a micro-batch is taken from the iterator.
    _check(model, optimizer, reduction, planned, target)
    least, most = max(2, positive_int("least", least)), positive_int("most", most)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    seen = _Seen(parameters)
    stopped = False
    for microbatch in microbatches:
        seen.add(loss_fn(microbatch), float(weight(microbatch)))
        ratio = seen.ratio()
        # At least `least`: an early ratio is mostly noise.
        stopped = seen.count >= least and ratio is not None and ratio <= target
        if stopped or seen.count >= most:
            break
    if not seen.count:
        raise InputError("The iterator has no more micro-batches. Make a new one.")
    # The norm of the sum: one infinity anywhere shows.
    norm = norm_of(seen.sums)
    if norm is None or not math.isfinite(float(norm)):
        raise NonFiniteError(
            "There is no gradient, or one that is not finite, and no update was made. Check the loss."
        )
    # By the planned weight and not by that of this window: this is what keeps it unbiased.
    _update(optimizer, parameters, [None if g is None else g / planned for g in seen.sums])
    return StoppedUpdate(
        loss=seen.loss / seen.weight,
        microbatches=seen.count,
        weight=seen.weight,
        factor=seen.weight / planned,
        ratio=seen.ratio(),
        stopped=stopped,
    )


class _Seen:
    """Sums over the micro-batches of a window so far."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)
        self.count, self.weight, self.loss = 0, 0.0, 0.0
        self._squares = 0.0  # sum |n_i g_i|^2
        self._weights = 0.0  # sum n_i^2

    def add(self, loss: Tensor, weight: float) -> None:
        # grad() and not backward(): .grad of the user is left alone.
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        norm = norm_of(gradients)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                old = self.sums[index]
                # The first one is copied: autograd may give two parameters one tensor (that of ``a + b``), or
                # one whose elements share memory (that of ``a.sum()``), and neither can be added to in place.
                self.sums[index] = gradient.clone() if old is None else old.add_(gradient)
        self.count, self.weight, self.loss = (
            self.count + 1,
            self.weight + weight,
            self.loss + float(loss.detach()),
        )
        self._squares += 0.0 if norm is None else float(norm) ** 2
        self._weights += weight * weight

    def ratio(self) -> float | None:
        """Noise over signal of the mean; None where it cannot be said."""
        norm = norm_of(self.sums)
        if self.count < 2 or norm is None or not self.weight:
            return None
        whole = self.weight**2
        # The variance of one sample cannot be estimated.
        if self._weights >= whole:  # all the weight is on one micro-batch
            return None
        found = estimate(self._squares / whole, float(norm) ** 2 / whole, self._weights / whole)
        return found.variance / found.signal if found.signal > 0 else None


def _update(optimizer: Optimizer, parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        # Also after an error in step(): a gradient left behind would be added to.
        optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)


def _check(model: nn.Module, optimizer: Optimizer, reduction: str, planned: float, target: float) -> None:
    # The mean of a window that stops by its own noise is biased.
    if reduction != "sum":
        raise InputError(
            f"reduction={reduction!r} is biased in a window that ends when its gradient is good enough: it "
            'ends early where the noise agrees with the signal. Use reduction="sum" with a loss summed over '
            "samples, or choose windows from past ones with superbatch.tuning.adaptive.Controller."
        )
    if not isinstance(optimizer, SGD):
        raise OptimizerError(
            f"{type(optimizer).__name__} may forget the length of a gradient, and in a window that ends when "
            "its gradient is good enough only the sum is unbiased. Use torch.optim.SGD, or "
            "superbatch.tuning.adaptive.Controller."
        )
    for name, value in (("planned", planned), ("target", target)):
        if isinstance(value, bool) or not 0 < value < math.inf:
            raise InputError(f"{name}={value!r} is not a positive number. Pass one.")
    if find_sync([model]).shared:
        raise InputError(
            "The model is on several ranks, each of which would end its window by itself. Use "
            "superbatch.torch.tuning.controller, whose windows are one length on all ranks."
        )
    # Ghost statistics would change with the length of the window.
    norms.refuse(norms.find_batchnorms([model]))
