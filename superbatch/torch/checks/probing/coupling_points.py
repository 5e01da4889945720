"""Points that couple the samples of a batch, as `virtual_batch` records them."""

from __future__ import annotations

from typing import Any

from superbatch.batch.tree import count_samples, take
from superbatch.results.coupling import CouplingPoint
from superbatch.torch.virtual import virtual_batch

from .problem import Problem, evaluate
from .untouched import untouched

_SAMPLES, _SIZE = 7, 3  # unequal micro-batches, and a number that no other dimension is likely to have


def find_coupling_points(problem: Problem, batch: Any) -> tuple[CouplingPoint, ...]:
    """Return every point of the forward that couples samples, in order: operator and module.

    It runs one forward and backward of a few samples in a `virtual_batch`. Unlike a comparison of numbers it
    needs no tolerance, and unlike the types of modules it finds hand-written code. The mean over samples at
    the end of a loss is no such point, because no sample reads its result. Each leaf of `batch` has samples.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> problem = Problem(model, lambda x: model(x).square().mean(), "mean", None, (), ())
        >>> [(point.module, point.operation) for point in find_coupling_points(problem, torch.randn(8, 2))]
        [('1', 'batch_norm')]
    """
    few = take(batch, 0, min(_SAMPLES, count_samples(batch)))
    # On working copies: the forward changes buffers, and the backward leaves gradients.
    with untouched(problem.model), virtual_batch(problem.model, _SIZE) as virtual:
        evaluate(problem, virtual(few))[0].backward()
    return virtual.report().points
