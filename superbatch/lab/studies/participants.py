"""The `Accumulator` of a recipe, with its loss, weight and participants; a training that measures noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from superbatch.noise.meter import NoiseMeter
from superbatch.results.noise import Noise
from superbatch.torch import Accumulator
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm

from ..recipes import Recipe


def participants_of(batchnorm: str) -> list[Any]:
    """Return what a recipe's `batchnorm` stands for."""
    return {"frozen": [FrozenBatchNorm()], "per_microbatch": [GhostBatchNorm()]}.get(batchnorm, [])


def accumulator(
    recipe: Recipe,
    model: nn.Module,
    optimizer: Any,
    *,
    loss_fn: Callable[[Any], Any] | None = None,
    participants: Sequence[Any] = (),
    **options: Any,
) -> Accumulator:
    """Make the accumulator of a recipe, whose own loss and participants may be wrapped and added to."""
    return Accumulator(
        model,
        optimizer,
        recipe.loss_fn(model) if loss_fn is None else loss_fn,
        reduction=recipe.reduction,
        weight=recipe.weight,
        participants=[*participants_of(recipe.batchnorm), *participants],
        **options,
    )


def measured(
    recipe: Recipe,
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    *,
    microbatch_size: int,
    beta: float = 0.98,
    preconditioned: bool = False,
) -> Iterator[tuple[float, Noise]]:
    """Train on the samples of each batch, and yield its loss and what is known of the noise after it."""
    # Every window is measured: a meter of its own accord leaves most of a small model's out.
    meter = NoiseMeter(beta, every=1, data_size=recipe.samples, preconditioned=preconditioned)
    accumulate = accumulator(recipe, model, optimizer, microbatch_size=microbatch_size, observers=[meter])
    for indices in batches:
        loss = accumulate(recipe.batch(indices)).loss
        assert accumulate.noise is not None
        yield loss, accumulate.noise
