"""The arms of a comparison: each a way to make one update of one batch.

* ``real``: the batch in one piece, by a loop written out in plain PyTorch. It is the reference, so it shares
  no code with the accumulator.
* ``exact``: `superbatch.torch.Accumulator`, or `superbatch.torch.WholeBatch` where samples are coupled.
* ``inexact``: the same where samples are coupled and micro-batches are taken one by one all the same.
* ``wrong``: loops that are often written, kept to show what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.split import cut as cut_planned
from superbatch.batch.tree import count_samples, plan
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.options import FrozenBatchNorm
from superbatch.window import Window

from ..recipes import Recipe
from .participants import accumulator
from .setting import WRONG, ArmPlan, Way
from .splits import Split

# Makes one update with a batch and returns the batch's mean loss before it.
UpdateFunction = Callable[[Any], float]
HOW: Mapping[Way, str] = {
    "real batch": "the whole batch at once, plain PyTorch",
    "accumulator": "superbatch.torch.Accumulator",
    "plain accumulation": "micro-batches one by one, weighted by their samples, though these are coupled",
    **WRONG,
}


def update_function(
    arm: ArmPlan, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer
) -> UpdateFunction:
    """Make the function that makes an arm's updates."""
    if arm.way in ("real batch", "again", "another batch"):
        return plain_update(recipe, model, optimizer)
    if arm.way not in ("accumulator", "plain accumulation"):
        return _wrong(arm, recipe, model, optimizer)
    plain, split = arm.way == "plain accumulation", arm.split
    recipe = without_coupling(recipe) if plain else recipe
    make_update = accumulator_of(split, recipe, model, optimizer, check=not plain)
    if split.equal:
        return lambda batch: make_update(batch).loss
    return lambda batch: make_update(Window(cut(batch, split.sizes_of(count_samples(batch))))).loss


def without_coupling(recipe: Recipe) -> Recipe:
    """A recipe of coupled samples with its micro-batches taken one by one, as a plain loop does."""
    frozen = recipe.batchnorm == "frozen"
    return replace(recipe, coupled="error", batchnorm="frozen" if frozen else "per_microbatch")


def cut(batch: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Cut a batch into consecutive micro-batches, views where the framework slices to views.

    Examples:
        >>> [part.tolist() for part in cut(torch.arange(4), (3, 1))]
        [[0, 1, 2], [3]]
    """
    return cut_planned(plan(batch), sizes)


def plain_update(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> UpdateFunction:
    """Make the function that makes an update from a batch in one piece, in plain PyTorch."""
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
    """Make the accumulator of an arm, by the recipe's own statement."""
    size = split.sizes[0] if split.equal else None  # unequal micro-batches are given to it as a `Window`
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
    arm: ArmPlan, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer
) -> UpdateFunction:
    loss_fn = recipe.loss_fn(model)
    full_window = len(arm.split.sizes)

    def update(batch: Any) -> float:
        microbatches = cut(batch, arm.split.sizes_of(count_samples(batch)))
        # A weight that only the loss function knows is asked for with a forward pass of its own: this loop
        # shows a wrong divisor, not a fast one.
        weights = [_weight(recipe, loss_fn, microbatch) for microbatch in microbatches]
        total, reported = sum(weights), 0.0
        for microbatch, weight in zip(microbatches, weights, strict=True):
            if arm.way == "missing 1/K":
                scale = 1.0
            elif arm.way == "mean of means":
                scale = 1 / len(microbatches)
            else:  # right in a full window; in a shorter one too small by the missing micro-batches' share
                scale = weight / total * len(microbatches) / full_window
            loss, _ = mean_and_weight(recipe, loss_fn, microbatch)
            (loss * scale).backward()
            reported += loss.item() * weight / total
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return reported

    return update


def mean_and_weight(recipe: Recipe, loss_fn: Callable[[Any], Any], batch: Any) -> tuple[Tensor, float]:
    """The mean loss of a batch or micro-batch, and its weight, by the recipe's own statement."""
    result = loss_fn(batch)
    if recipe.weight == "returned":
        loss, weight = result
        weight = float(weight)
    else:
        loss, weight = result, count_samples(batch) if recipe.weight is None else recipe.weight(batch)
    return (loss / weight if recipe.reduction == "sum" else loss), weight


@torch.no_grad()
def _weight(recipe: Recipe, loss_fn: Callable[[Any], Any], microbatch: Any) -> float:
    if recipe.weight == "returned":
        return mean_and_weight(recipe, loss_fn, microbatch)[1]
    return count_samples(microbatch) if recipe.weight is None else recipe.weight(microbatch)
