"""Train one arm from one seed: every arm has the same initial weights and the same order of samples."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.recipes import Recipe
from superbatch.report.comparison import Run
from superbatch.studies.arms import ArmPlan, update_function
from superbatch.torch.memory import peak_bytes
from superbatch.tree import map_arrays

CURVE_POINTS = 50
FLOOR = 1e-3
TAILS_IN_A_RUN = 10
"""At least so many tails, so that even a short run shows what they do."""

Weights = Mapping[str, Tensor]
Tick = Callable[[int], None]


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison share. It can be sent to another process.

    Attributes:
        arms: the real batch first.
        updates: of each run.
        batch_size: samples of one update.
        tail: samples of the short batch at the end of each epoch; None: epochs run into each other.
        dtype: name of a torch dtype.
        optimizer: one of the recipe's.
        learning_rate: constant over the run.
    """

    arms: tuple[ArmPlan, ...]
    updates: int
    batch_size: int
    tail: int | None
    dtype: str
    optimizer: str
    learning_rate: float


def orders(samples: int, setting: Setting, seed: int) -> Iterator[Tensor]:
    """Draw the samples of each batch: permutation after permutation.

    Without a tail the permutations are concatenated and cut into batches. With one, each permutation is used
    up to a short last batch, and the samples beyond it are left out; at least ten such ends fall into a run.

    Args:
        samples: of the training set.
        setting: says how many batches, how large, and whether epochs end with a tail.
        seed: of the permutations.

    Yields:
        Indices, int64 of shape (batch,).

    Examples:
        >>> setting = Setting(
        ...     arms=(), updates=4, batch_size=4, tail=2, dtype="float32", optimizer="sgd", learning_rate=0.1
        ... )
        >>> [len(batch) for batch in orders(11, setting, seed=0)]
        [4, 2, 4, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    size, tail, left = setting.batch_size, setting.tail, setting.updates
    pending = torch.empty(0, dtype=torch.int64)
    often = max(1, setting.updates // TAILS_IN_A_RUN - 1)
    while left > 0:
        pending = torch.cat([pending, torch.randperm(samples, generator=generator)])
        full = len(pending) // size if tail is None else min((samples - tail) // size, often)
        batches = list(pending[: full * size].split(size))
        if tail is not None:
            batches.append(pending[full * size : full * size + tail])
        pending = pending[full * size :] if tail is None else pending[:0]
        yield from batches[:left]
        left -= len(batches)


def train_seed(
    recipe: Recipe, setting: Setting, seed: int, *, tick: Tick = lambda microbatches: None
) -> Iterator[tuple[int, Run]]:
    """Train every arm from one seed.

    Args:
        recipe: what is trained.
        setting: how.
        seed: of the initial weights and the order of the samples.
        tick: called after each update with its number of micro-batches.

    Yields:
        (index of the arm, its run), the real batch first.
    """
    initial = recipe.model(seed).to(getattr(torch, setting.dtype))
    reference: Weights | None = None
    for index, arm in enumerate(setting.arms):
        # A copy, not a second call: the initial weights are the same whatever the recipe's function does.
        model = copy.deepcopy(initial)
        losses, seconds = _train(recipe, setting, arm, model, seed, tick)
        weights = weights_of(model)
        run = Run(
            seed=seed,
            metric=float(recipe.evaluate(model)),
            losses=tuple(
                statistics.fmean(losses[start:stop])
                for start, stop in pairwise((0, *curve_updates(setting.updates)))
            ),
            seconds=seconds,
            **({} if reference is None else difference(weights, reference)),
        )
        reference = reference or weights
        yield index, run


def peak_of_update(recipe: Recipe, setting: Setting, arm: ArmPlan) -> int:
    """Measure the memory that one update of an arm allocates, on a model that is thrown away.

    The first update is made but not measured: it creates the optimizer's state, and the accumulator's checks
    run in it - a recipe that it refuses is refused here, before any training.

    Args:
        recipe: what is trained.
        setting: how.
        arm: whose update.

    Returns:
        Bytes at the peak: gradients, activations and temporary tensors.
    """
    model = recipe.model(0).to(getattr(torch, setting.dtype))
    update = update_function(arm, recipe, model, _optimizer(recipe, setting, model))
    batch = cast_batch(recipe.batch(torch.arange(setting.batch_size)), setting.dtype)
    with torch.random.fork_rng(devices=[]):
        update(batch)
        return peak_bytes(lambda: update(batch))


def curve_updates(updates: int) -> tuple[int, ...]:
    """The last update of each of up to 50 near-equal stretches of a run.

    Args:
        updates: of the run.

    Returns:
        Increasing numbers of updates, the last is `updates`.

    Examples:
        >>> curve_updates(3), curve_updates(1000)[:3]
        ((1, 2, 3), (20, 40, 60))
    """
    points = min(CURVE_POINTS, updates)
    return tuple((point + 1) * updates // points for point in range(points))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters in float64 on the CPU.

    Args:
        model: any.

    Returns:
        Name -> values.
    """
    return {name: parameter.detach().cpu().double().clone() for name, parameter in model.named_parameters()}


def difference(weights: Weights, reference: Weights) -> dict[str, Any]:
    """The relative differences of a run's weights from the reference's, as `Run` has them.

    All weights: ``|w - r| / |r|``. One parameter p: ``|w_p - r_p| / max(|r_p|, 1e-3 |r|)``; the floor keeps a
    parameter that is zero but for rounding from looking different. 2-norms; infinite where they are not
    numbers.

    Args:
        weights: name -> values.
        reference: the same names.

    Returns:
        ``weight_difference``, ``worst_difference`` and ``worst_parameter``.

    Examples:
        >>> r = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
        >>> difference({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([13.3])}, r)["worst_parameter"]
        'b'
    """
    apart = {name: _number((weights[name] - value).norm()) for name, value in reference.items()}
    whole = math.hypot(*(float(value.norm()) for value in reference.values()))
    if not math.isfinite(whole):
        return {"weight_difference": math.inf, "worst_difference": math.inf, "worst_parameter": None}
    relative = {
        name: 0.0 if distance == 0 else distance / max(float(reference[name].norm()), FLOOR * whole)
        for name, distance in apart.items()
    }
    worst = max(relative, key=lambda name: relative[name])
    return {
        "weight_difference": math.hypot(*apart.values()) / whole,
        "worst_difference": relative[worst],
        "worst_parameter": worst,
    }


def _number(norm: Tensor) -> float:
    return float(norm) if math.isfinite(norm) else math.inf


def _train(
    recipe: Recipe, setting: Setting, arm: ArmPlan, model: nn.Module, seed: int, tick: Tick
) -> tuple[list[float], float]:
    update = update_function(arm, recipe, model, _optimizer(recipe, setting, model))
    losses: list[float] = []
    seconds = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # a model that draws (dropout) starts every arm from the same state
        for indices in orders(recipe.samples, setting, seed):
            batch = cast_batch(recipe.batch(indices), setting.dtype)
            start = time.perf_counter()
            losses.append(update(batch))
            seconds += time.perf_counter() - start
            tick(len(arm.split.sizes))
    return losses, seconds


def _optimizer(recipe: Recipe, setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)


def cast_batch(batch: Any, dtype: str) -> Any:
    """A batch with its floating-point leaves in another dtype.

    Args:
        batch: any structure that the accumulator splits, floating-point leaves in float32.
        dtype: name of a torch dtype.

    Returns:
        The batch itself for float32, else a copy.
    """
    wanted = getattr(torch, dtype)

    def cast(leaf: Any) -> Any:
        return leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return batch if wanted is torch.float32 else map_arrays(cast, batch)
