"""Training of the digits task that the backends other than torch share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..recipes import Recipe
from ..recipes.drawing import Draws
from .backends import TrainArms, Trained, timed
from .setting import ArmSpec, Setting, Tick, batches


class Steps(NamedTuple):
    """Functions of one run that is ready to start: compiled, and with the initial weights of its seed."""

    prepare: Callable[[Any], Any]  # sample indices -> the batch that `update` takes; not timed
    update: Callable[[Any], float]  # makes one update; returns the mean loss before it
    weights: Callable[[], Mapping[str, Any]]  # the weights now, with torch's names and shapes


def trainer(
    begin: Callable[[Recipe, Setting, ArmSpec, int], Steps],
    within: Callable[[str], AbstractContextManager[Any]] = lambda dtype: nullcontext(),
) -> TrainArms:
    """Return the function that trains every arm from one seed, with torch's initial weights and order.

    `begin` prepares a run of an arm from a seed. `within` returns a context that sets the dtype, for
    frameworks that keep it for the whole process.
    """

    def train(recipe: Recipe, setting: Setting, seed: int, tick: Tick) -> Iterator[Trained]:
        for arm in setting.arms:
            draw = partial(Draws(seed).permutation, recipe.samples)
            order, ticks = batches(draw, recipe.samples, setting), partial(tick, len(arm.split.sizes))
            with within(setting.dtype):
                steps = begin(recipe, setting, arm, seed)
                # An update of each batch size compiles the program, so that no timed update does.
                for size in {setting.batch_size, setting.tail or setting.batch_size}:
                    steps.update(steps.prepare(np.arange(size)))
                steps = begin(recipe, setting, arm, seed)
                losses, seconds = timed(order, steps.prepare, steps.update, ticks)
                found: Any = {name: np.asarray(values) for name, values in steps.weights().items()}
            yield Trained(
                losses=losses,
                seconds=seconds,
                metric=recipe.evaluate(found),
                weights={name: values.astype(np.float64) for name, values in found.items()},
            )

    return train


def optimizers_of(keras: Any) -> Mapping[str, Callable[..., Any]]:
    """Return name of the recipe -> optimizer of Keras, which TensorFlow takes, too."""
    kinds = keras.optimizers
    return {
        "sgd": kinds.SGD,
        "momentum": partial(kinds.SGD, momentum=0.9),
        "adam": kinds.Adam,
        "adamw": partial(kinds.AdamW, weight_decay=0.01),  # torch's default
    }


def restore(optimizer: Any, start: list[Any]) -> None:
    """Set the variables of a Keras optimizer to their values before the first update."""
    for variable, value in zip(optimizer.variables, start, strict=True):
        variable.assign(value)
