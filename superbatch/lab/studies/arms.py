"""The arms of a comparison on torch: each is a method of making one update from one batch.

The claims of the arms:

* ``real``: the batch in one piece, in plain PyTorch. It is the reference, so it shares no code with the
  accumulator.
* ``exact``: `superbatch.torch.Accumulator`, or `superbatch.torch.WholeBatch` for coupled samples.
* ``inexact``: `Accumulator` with coupled samples, which computes the loss of each micro-batch alone.
* ``wrong``: common mistakes in hand-written loops, to show their effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.split import cut as cut_planned
from superbatch.batch.tree import count_samples, plan
from superbatch.noise.meter import NoiseMeter
from superbatch.results.noise import Noise
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm
from superbatch.window import Window

from ..recipes import Recipe
from .setting import WRONG, ArmSpec, Method, Split

UpdateFunction = Callable[[Any], float]  # makes an update from a batch; returns its mean loss before
HOW: Mapping[Method, str] = {
    "real batch": "the whole batch at once, plain PyTorch",
    "accumulator": "superbatch.torch.Accumulator",
    "plain accumulation": "micro-batches one by one, weighted by their samples, although these are coupled",
    **WRONG,
}


def update_function(
    arm: ArmSpec, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer
) -> UpdateFunction:
    """Return the function that makes an arm's updates."""
    if arm.method in ("real batch", "again", "another batch"):
        return plain_update(recipe, model, optimizer)
    if arm.method not in ("accumulator", "plain accumulation"):
        return _wrong(arm, recipe, model, optimizer)
    plain, split = arm.method == "plain accumulation", arm.split
    recipe = without_coupling(recipe) if plain else recipe
    make_update = accumulator_of(split, recipe, model, optimizer, check=not plain)
    if split.equal:
        return lambda batch: make_update(batch).loss
    return lambda batch: make_update(Window(cut(batch, split.sizes_of(count_samples(batch))))).loss


def without_coupling(recipe: Recipe) -> Recipe:
    """Return a recipe whose loss is computed for each micro-batch alone, as a plain loop does."""
    frozen = recipe.batchnorm == "frozen"
    return replace(recipe, coupled="error", batchnorm="frozen" if frozen else "per_microbatch")


def cut(batch: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Cut a batch into consecutive micro-batches, which are views if slices of the leaves are.

    Examples:
        >>> [part.tolist() for part in cut(torch.arange(4), (3, 1))]
        [[0, 1, 2], [3]]
    """
    return cut_planned(plan(batch), sizes)


def plain_update(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> UpdateFunction:
    """Return a function that makes an update from a batch in one piece, in plain PyTorch."""
    loss_fn = recipe.loss_fn(model)

    def update(batch: Any) -> float:
        loss, _ = mean_and_weight(recipe, loss_fn, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return update


def accumulator_of(
    split: Split, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, *, check: bool = True
) -> Accumulator | WholeBatch:
    """Return the accumulator of an arm, with the recipe's reduction, weight and coupling."""
    size = split.sizes[0] if split.equal else None  # unequal micro-batches are passed as a `Window`
    if recipe.coupled == "exact":
        return WholeBatch(
            model,
            optimizer,
            recipe.loss_fn(model),
            microbatch_size=size,
            rng="batch",
            participants=[FrozenBatchNorm()] if recipe.batchnorm == "frozen" else (),
        )
    return accumulator(recipe, model, optimizer, microbatch_size=size, check=check)


def _wrong(
    arm: ArmSpec, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer
) -> UpdateFunction:
    """Return a function that makes updates with a wrong divisor."""
    loss_fn = recipe.loss_fn(model)
    full_window = len(arm.split.sizes)

    def update(batch: Any) -> float:
        microbatches = cut(batch, arm.split.sizes_of(count_samples(batch)))
        # A weight that the loss function returns takes an extra forward pass; this loop need not be fast.
        weights = [_weight(recipe, loss_fn, microbatch) for microbatch in microbatches]
        total, reported = sum(weights), 0.0
        for microbatch, weight in zip(microbatches, weights, strict=True):
            if arm.method == "missing 1/K":
                scale = 1.0
            elif arm.method == "mean of means":
                scale = 1 / len(microbatches)
            else:  # right in a full window; too small in a shorter one
                scale = weight / total * len(microbatches) / full_window
            loss, _ = mean_and_weight(recipe, loss_fn, microbatch)
            (loss * scale).backward()
            reported += loss.item() * weight / total
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return reported

    return update


def mean_and_weight(recipe: Recipe, loss_fn: Callable[[Any], Any], batch: Any) -> tuple[Tensor, float]:
    """Return the mean loss of a batch or micro-batch and its weight, by the recipe's reduction and weight."""
    result = loss_fn(batch)
    if recipe.weight == "returned":
        loss, weight = result[0], float(result[1])
    else:
        loss, weight = result, _weight(recipe, loss_fn, batch)
    return (loss / weight if recipe.reduction == "sum" else loss), weight


@torch.no_grad()
def _weight(recipe: Recipe, loss_fn: Callable[[Any], Any], batch: Any) -> float:
    if recipe.weight == "returned":
        return mean_and_weight(recipe, loss_fn, batch)[1]
    return count_samples(batch) if recipe.weight is None else recipe.weight(batch)


def participants_of(batchnorm: str) -> list[Any]:
    """Return the participants for a recipe's `batchnorm`."""
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
    """Return the accumulator of a recipe.

    `loss_fn` replaces the recipe's loss, `participants` are added, and options are passed to `Accumulator`.
    """
    return Accumulator(
        model,
        optimizer,
        recipe.loss_fn(model) if loss_fn is None else loss_fn,
        reduction=recipe.reduction,
        weight=recipe.weight,
        participants=[*participants_of(recipe.batchnorm), *participants],
        **options,
    )


def losses_and_noise(
    recipe: Recipe,
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    *,
    microbatch_size: int,
    beta: float = 0.98,
    preconditioned: bool = False,
) -> Iterator[tuple[float, Noise]]:
    """Train on batches of sample indices, and yield the loss of each and the noise measured so far."""
    # Measure every window: by default a meter skips most windows of a small model.
    meter = NoiseMeter(beta, every=1, data_size=recipe.samples, preconditioned=preconditioned)
    accumulate = accumulator(recipe, model, optimizer, microbatch_size=microbatch_size, observers=[meter])
    for indices in batches:
        loss = accumulate(recipe.batch(indices)).loss
        assert accumulate.noise is not None
        yield loss, accumulate.noise
