# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Backend JAX of a comparison: each update is one compiled program that loops over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from superbatch.jax import value_and_grad

from ..recipes import Recipe
from ..recipes.digits_data import digits_elsewhere
from .backends import Backend
from .setting import WRONG, ArmSpec, Method, Setting
from .without_torch import Steps, trainer

OPTIMIZERS: Mapping[str, Callable[[float], Any]] = {
    "sgd": optax.sgd,
    "momentum": partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adamw": partial(optax.adamw, weight_decay=0.01),  # torch's default
}
HOW: Mapping[Method, str] = {
    "real batch": "the whole batch at once, jax.value_and_grad",
    "accumulator": "superbatch.jax.value_and_grad",
    **WRONG,
}
MEMORY = (
    "Peak memory is that of the temporary buffers of one update in XLA's plan "
    "(memory_analysis().temp_size_in_bytes), with copies of micro-batches. Micro-batches of unequal size are "
    "padded to the largest."
)


def losses_of(weights: Any, images: Any, labels: Any) -> Any:
    """Return the cross entropy of each image."""
    hidden = jax.nn.relu(images @ weights["0.weight"].T + weights["0.bias"])
    scores = hidden @ weights["2.weight"].T + weights["2.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def mean_loss(weights: Any, batch: Any) -> Any:
    """Return the mean cross entropy of a batch or micro-batch of (images, labels)."""
    return losses_of(weights, *batch).mean()


def gradient_function(arm: ArmSpec, samples: int) -> Callable[[Any, Any], Any]:
    """Return the function (weights, batch) -> (loss, gradient) of an arm."""
    if arm.method == "real batch":
        return jax.value_and_grad(mean_loss)
    if arm.split.equal:
        size = arm.split.sizes[0]
        right = value_and_grad(mean_loss, microbatch_size=size, check=False)
        if arm.method == "accumulator":
            return right
        share = len(arm.split.sizes_of(samples)) / len(arm.split.sizes)

        def scaled(weights: Any, batch: Any) -> Any:
            loss, gradient = right(weights, batch)
            return loss, jax.tree.map(lambda leaf: share * leaf, gradient)

        return scaled
    if arm.method == "accumulator":
        return value_and_grad(_mean_of_parts, microbatch_size=1, weight=_count, check=False)
    # Each micro-batch has the weight of one row, whatever its samples; the check would refuse that.
    unweighted = value_and_grad(_mean_of_parts, microbatch_size=1, check=False)
    return lambda weights, batch: (_mean_of_parts(weights, batch), unweighted(weights, batch)[1])


def prepared(arm: ArmSpec, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return a batch in the layout of an arm: unequal micro-batches are padded, with a mask of real rows."""
    if arm.method == "real batch" or arm.split.equal:
        return images, labels
    sizes = arm.split.sizes_of(len(labels))
    real = np.arange(max(sizes)) < np.array(sizes)[:, None]
    padded = np.zeros((*real.shape, images.shape[1]), images.dtype), np.zeros(real.shape, labels.dtype)
    for whole, parts in zip((images, labels), padded, strict=True):
        parts[real] = whole  # the rows of the first micro-batch, then those of the second, ...
    return *padded, real.astype(images.dtype)


@partial(jax.jit, static_argnames=("arm", "optimizer", "learning_rate"))
def update(
    weights: Any, state: Any, batch: Any, *, arm: ArmSpec, optimizer: str, learning_rate: float
) -> Any:
    """Make one update. It is compiled once for each arm, batch size and dtype."""
    loss, gradient = gradient_function(arm, len(batch[1]))(weights, batch)
    changes, state = OPTIMIZERS[optimizer](learning_rate).update(gradient, state, weights)
    return optax.apply_updates(weights, changes), state, loss


def peak_of_update(recipe: Recipe, setting: Setting, arm: ArmSpec) -> int:
    """Return the bytes of temporary memory that the compiled update of an arm needs."""
    with jax.enable_x64(setting.dtype == "float64"):
        weights, state = _initial(recipe, setting, 0)
        batch = _batch(recipe, np.arange(setting.batch_size), setting, arm)
        program: Any = update
        compiled = program.lower(weights, state, batch, **_static(setting, arm)).compile()
        return compiled.memory_analysis().temp_size_in_bytes


def _begin(recipe: Recipe, setting: Setting, arm: ArmSpec, seed: int) -> Steps:
    static = _static(setting, arm)
    weights, state = _initial(recipe, setting, seed)

    def one_update(batch: Any) -> float:
        nonlocal weights, state
        weights, state, loss = update(weights, state, batch, **static)
        return float(loss)

    return Steps(lambda indices: _batch(recipe, indices, setting, arm), one_update, lambda: weights)


def _initial(recipe: Recipe, setting: Setting, seed: int) -> tuple[Any, Any]:
    drawn: Any = recipe.model(seed)
    weights = {name: jnp.asarray(values, setting.dtype) for name, values in drawn.items()}
    return weights, OPTIMIZERS[setting.optimizer](setting.learning_rate).init(weights)


def _static(setting: Setting, arm: ArmSpec) -> dict[str, Any]:
    return {"arm": arm, "optimizer": setting.optimizer, "learning_rate": setting.learning_rate}


def _batch(recipe: Recipe, indices: Any, setting: Setting, arm: ArmSpec) -> Any:
    images, labels = recipe.batch(indices)
    ready = prepared(arm, images.astype(setting.dtype), labels.astype(np.int32))
    return tuple(map(jnp.asarray, ready))


def _mean_of_parts(weights: Any, parts: Any) -> Any:
    images, labels, real = parts
    return (losses_of(weights, images, labels) * real).sum() / real.sum()


def _count(part: Any) -> Any:
    return part[2].sum()


BACKEND = Backend(
    title="jax",
    load=lambda name, data: digits_elsewhere(),
    train=trainer(_begin, lambda dtype: jax.enable_x64(dtype == "float64")),
    peak_of_update=peak_of_update,
    how=HOW,
    versions=lambda: {"jax": jax.__version__, "optax": optax.__version__},
    notes=(MEMORY,),
)
