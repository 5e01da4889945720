"""The digits task on a backend that is not torch: what does not depend on which one it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..recipes import Recipe
from ..recipes.drawing import Draws
from .backends import TrainArms, Trained, timed
from .setting import ArmPlan, Setting, Tick, batches


class Steps(NamedTuple):
    """One run that is ready to start: compiled, with the initial weights of its seed."""

    prepare: Callable[[Any], Any]  # indices of the samples -> their batch, off the clock
    update: Callable[[Any], float]  # makes one update; returns the mean loss before it
    weights: Callable[[], Mapping[str, Any]]  # by torch's names, in torch's shapes


def trainer(
    begin: Callable[[Recipe, Setting, ArmPlan, int], Steps],
    within: Callable[[str], AbstractContextManager[Any]] = lambda dtype: nullcontext(),
) -> TrainArms:
    """Make the function that trains every arm from one seed, from the weights and in the order of torch.

    Each arm is trained within a context of its dtype, which a framework may keep for the whole process.
    """

    def train(recipe: Recipe, setting: Setting, seed: int, tick: Tick) -> Iterator[Trained]:
        for arm in setting.arms:
            draw = partial(Draws(seed).permutation, recipe.samples)
            order, ticks = batches(draw, recipe.samples, setting), partial(tick, len(arm.split.sizes))
            with within(setting.dtype):
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
    """The optimizers of Keras, which TensorFlow takes too, by the names of the recipes."""
    kinds = keras.optimizers
    return {
        "sgd": kinds.SGD,
        "momentum": partial(kinds.SGD, momentum=0.9),
        "adam": kinds.Adam,
        "adamw": partial(kinds.AdamW, weight_decay=0.01),  # torch's default
    }


def restore(optimizer: Any, start: list[Any]) -> None:
    """Take an optimizer of Keras to before the first update."""
    for variable, value in zip(optimizer.variables, start, strict=True):
        variable.assign(value)
