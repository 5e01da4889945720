# Keras is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Backend Keras of a comparison, with any framework: each update is one `train_on_batch`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np

from superbatch.errors import InputError
from superbatch.keras import accumulate

from ..recipes import Recipe
from ..recipes.digits_data import digits_elsewhere, initial_weights
from .backends import Backend
from .setting import ArmSpec, Method, Setting
from .without_torch import Steps, optimizers_of, restore, trainer

OPTIMIZERS = optimizers_of(keras)
HOW: Mapping[Method, str] = {
    "real batch": "the whole batch at once, Keras' own train step",
    "accumulator": "superbatch.keras.accumulate",
}
MEMORY = "Peak memory is left out: Keras does not report the allocations of an update."


@dataclass(frozen=True)
class Program:
    """A model that is compiled once and used for all runs of an arm."""

    model: Any  # with its optimizer
    start: list[Any]  # values of the optimizer's variables before the first update

    def begin(self, seed: int) -> None:
        """Reset the weights to the initial ones of a seed, and the optimizer."""
        drawn = initial_weights(seed)
        self.model.set_weights([values.T for values in drawn.values()])
        restore(self.model.optimizer, self.start)

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights with torch's names and shapes: a kernel of Keras is a transposed weight."""
        return {
            name: np.array(values).T
            for name, values in zip(initial_weights(0), self.model.get_weights(), strict=True)
        }


@cache
def program(microbatch_size: int | None, optimizer: str, learning_rate: float, dtype: str) -> Program:
    """Return the compiled model of an arm."""
    layers = keras.layers
    model: Any = keras.Sequential(
        [
            layers.Input((64,), dtype=dtype),
            layers.Dense(32, activation="relu", dtype=dtype),
            layers.Dense(10, dtype=dtype),
        ]
    )
    # Keras rounds a learning rate given as a number to float32, but not one that a function returns.
    rate = lambda: keras.ops.convert_to_tensor(learning_rate, dtype)  # noqa: E731  (one line says it)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype)
    model.compile(OPTIMIZERS[optimizer](learning_rate=rate), loss)
    model.optimizer.build(model.trainable_variables)
    start = [variable.numpy() for variable in model.optimizer.variables]
    if microbatch_size is not None:
        model = accumulate(model, microbatch_size=microbatch_size)
    return Program(model, start)


def check(setting: Setting) -> None:
    """Raise `InputError` for wrong methods, uneven micro-batches, and float64 on torch."""
    if setting.tail is not None:
        raise InputError(
            "backend='keras' with include_wrong: the wrong methods are hand-written loops; Keras makes the "
            "update itself. Leave include_wrong out, or use the backend torch, jax or tensorflow."
        )
    if keras.backend.backend() == "torch" and setting.dtype != "float32":
        raise InputError(
            f"backend='keras' on torch with dtype={setting.dtype!r}: there Keras multiplies matrices in "
            "float32 only. Use float32, or set KERAS_BACKEND to tensorflow or jax."
        )
    for arm in setting.arms:
        *most, last = arm.split.sizes
        if len(set(most)) > 1 or (most and last > most[0]):
            raise InputError(
                f"backend='keras' cannot make the split {arm.split.name}: Keras' micro-batches have one "
                "size, and only the last may be smaller. Give splits such as 5x20 or 40/40/20."
            )


def _begin(recipe: Recipe, setting: Setting, arm: ArmSpec, seed: int) -> Steps:
    size = None if arm.method == "real batch" else arm.split.sizes[0]
    of_arm = program(size, setting.optimizer, setting.learning_rate, setting.dtype)

    def prepare(indices: Any) -> tuple[Any, Any]:
        images, labels = recipe.batch(indices)
        return images.astype(setting.dtype), labels.astype(np.int32)

    def update(batch: tuple[Any, Any]) -> float:
        return float(np.ravel(of_arm.model.train_on_batch(*batch))[0])

    of_arm.begin(seed)
    return Steps(prepare, update, of_arm.weights)


@contextmanager
def _dtype(dtype: str) -> Iterator[None]:
    """Set the dtype of Keras' inputs, losses and gradients, which is global, for the block."""
    before = keras.config.floatx()
    wide = nullcontext()
    if keras.backend.backend() == "jax":
        wide = importlib.import_module("jax").enable_x64(dtype == "float64")
    keras.config.set_floatx(dtype)
    try:
        with wide:
            yield
    finally:
        keras.config.set_floatx(before)


def _threads(count: int) -> AbstractContextManager[None]:
    """Return a context with this many threads if Keras is set to torch, else one that does nothing."""
    if keras.backend.backend() != "torch":
        return nullcontext()
    return importlib.import_module("superbatch.lab.studies.on_torch").torch_threads(count)


BACKEND = Backend(
    title=f"keras ({keras.backend.backend()})",
    load=lambda name, data: digits_elsewhere(),
    check=check,
    train=trainer(_begin, _dtype),
    how=HOW,
    versions=lambda: {
        name: importlib.import_module(name).__version__ for name in ("keras", keras.backend.backend())
    },
    threads=_threads,
    notes=(MEMORY,),
)
