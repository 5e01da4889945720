"""Optimizer, scheduler and accumulation steps of an Accumulator from a Caffe solver file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from superbatch.caffe import SmoothedLoss, SolverConfig

from .optimizer import CaffeOptimizer, Clip
from .rate import CaffeRate


@dataclass(frozen=True)
class CaffeSolver:
    """Optimizer, scheduler and settings that reproduce a solver file; returned by `solver`.

    Attributes:
        config: the solver.
        optimizer: optimizer for the Accumulator.
        scheduler: scheduler for the Accumulator.
        accumulation_steps: the solver's ``iter_size``, for `windows`.
        smoothed_loss: computes the loss that Caffe displays from the loss of each update.
    """

    config: SolverConfig
    optimizer: CaffeOptimizer
    scheduler: CaffeRate
    accumulation_steps: int
    smoothed_loss: SmoothedLoss


def solver(config: SolverConfig, parameters: Iterable[Any], *, clip: Clip = "caffe") -> CaffeSolver:
    """Return the optimizer, the scheduler and the accumulation steps that reproduce a Caffe solver.

    Args:
        config: from `superbatch.caffe.read_solver`.
        parameters: parameters, or parameter groups with ``"lr_mult"`` and ``"decay_mult"``.
        clip: the gradient whose norm ``clip_gradients`` limits: ``"caffe"``, the sum over ``iter_size``
            micro-batches, or ``"mean"``, the gradient of the batch.

    Returns:
        The optimizer, the scheduler and the settings to use with an Accumulator.

    Raises:
        InputError: an argument has the wrong type or value.

    Examples:
        >>> import torch
        >>> from superbatch.caffe import parse_solver
        >>> from superbatch.torch import Accumulator, windows
        >>> model = torch.nn.Linear(3, 1)
        >>> caffe = solver(parse_solver('base_lr: 0.1 lr_policy: "fixed" iter_size: 4'), model.parameters())
        >>> accumulate = Accumulator(
        ...     model, caffe.optimizer, lambda x: model(x).square().mean(), scheduler=caffe.scheduler
        ... )
        >>> [accumulate(window).samples for window in windows(torch.randn(8, 5, 3), caffe.accumulation_steps)]
        [20, 20]
    """
    # The optimizer first, because the scheduler writes its initial rates to it.
    optimizer = CaffeOptimizer(parameters, config, clip=clip)
    return CaffeSolver(
        config=config,
        optimizer=optimizer,
        scheduler=CaffeRate(optimizer, config),
        # Caffe's iter_size is the number of micro-batches per update.
        accumulation_steps=config.iter_size,
        smoothed_loss=SmoothedLoss(config.average_loss),
    )
