"""Backend torch of a comparison: any recipe, and every method of `superbatch.lab.studies.arms`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.tree import map_arrays
from superbatch.torch.memory.meter import peak_bytes

from ..recipes import Recipe, load_recipe
from .arms import HOW, update_function
from .backends import Backend, Trained, timed
from .setting import ArmSpec, Setting, Tick, batches


def orders(samples: int, setting: Setting, seed: int) -> Iterator[Tensor]:
    """Yield the sample indices of each batch, as `setting.batches` does with permutations of torch."""
    generator = torch.Generator().manual_seed(seed)
    draws = batches(lambda: torch.randperm(samples, generator=generator).numpy(), samples, setting)
    yield from map(torch.from_numpy, draws)


def train(recipe: Recipe, setting: Setting, seed: int, tick: Tick) -> Iterator[Trained]:
    """Train every arm from one seed."""
    initial = recipe.model(seed).to(getattr(torch, setting.dtype))
    for arm in setting.arms:
        # A copy, because a second call of the recipe's function might return other weights.
        model = copy.deepcopy(initial)
        update = update_function(arm, recipe, model, _optimizer(recipe, setting, model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # random layers (dropout) start every arm from the same state
            losses, seconds = timed(
                orders(recipe.samples, setting, seed),
                lambda indices: cast_batch(recipe.batch(indices), setting.dtype),
                update,
                partial(tick, len(arm.split.sizes)),
            )
        yield Trained(
            losses=losses, seconds=seconds, metric=float(recipe.evaluate(model)), weights=weights_of(model)
        )


def peak_of_update(recipe: Recipe, setting: Setting, arm: ArmSpec) -> int:
    """Measure the peak of memory that one update of an arm allocates, on a model of its own.

    The first update is not measured: it creates the optimizer's state and runs the accumulator's checks. So a
    recipe that these refuse raises here, before any training.
    """
    model = recipe.model(0).to(getattr(torch, setting.dtype))
    update = update_function(arm, recipe, model, _optimizer(recipe, setting, model))
    batch = cast_batch(recipe.batch(torch.arange(setting.batch_size)), setting.dtype)
    with torch.random.fork_rng(devices=[]):
        update(batch)
        return peak_bytes(lambda: update(batch))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters, by name, in float64 on the CPU."""
    return {name: parameter.detach().cpu().double().clone() for name, parameter in model.named_parameters()}


def _optimizer(recipe: Recipe, setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)


def cast_batch(batch: Any, dtype: str) -> Any:
    """Return a batch with its floating-point leaves in another dtype."""
    wanted = getattr(torch, dtype)

    def cast(leaf: Any) -> Any:
        return leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return batch if wanted is torch.float32 else map_arrays(cast, batch)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


BACKEND = Backend(
    title="torch",
    load=lambda name, data: load_recipe(name, data=data),
    train=train,
    peak_of_update=peak_of_update,
    how=HOW,
    versions=lambda: {"torch": torch.__version__},
    threads=torch_threads,
)
