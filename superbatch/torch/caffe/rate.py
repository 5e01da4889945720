"""Caffe's learning-rate policies as a torch scheduler."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from superbatch.caffe import SolverConfig
from superbatch.caffe.rates import rate_schedule


class CaffeRate(LRScheduler):
    """Scheduler that sets ``lr = rate(update) * lr_mult`` of every parameter group; step it once per update.

    Args:
        optimizer: a `CaffeOptimizer`, or any other, whose groups without ``lr_mult`` use 1.
        config: the solver.
        last_epoch: index of the last update made; -1: none.

    Examples:
        >>> import torch
        >>> from superbatch.caffe import parse_solver
        >>> from superbatch.torch.caffe import CaffeOptimizer
        >>> config = parse_solver('base_lr: 1 lr_policy: "step" gamma: 0.5 stepsize: 2')
        >>> optimizer = CaffeOptimizer([torch.nn.Parameter(torch.zeros(1))], config)
        >>> rate, rates = CaffeRate(optimizer, config), []
        >>> for _ in range(5):
        ...     optimizer.step()
        ...     rate.step()
        ...     rates += rate.get_last_lr()
        >>> rates
        [1.0, 0.5, 0.5, 0.25, 0.25]
    """

    def __init__(self, optimizer: Optimizer, config: SolverConfig, last_epoch: int = -1) -> None:
        # Before super().__init__(), which calls get_lr().
        self._rate = rate_schedule(config)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the rates of the groups for the next update."""
        rate = self._rate(self.last_epoch)
        # From the policy, not from the last rate, so that rounding errors do not add up.
        return [rate * group.get("lr_mult", 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, without the policy, which is in the solver file."""
        # Without _rate, because a closure cannot be pickled.
        return {name: value for name, value in super().state_dict().items() if name != "_rate"}
