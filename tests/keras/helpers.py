# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Small models, and the comparison of an accumulating model with Keras' own fit of the whole batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from superbatch.errors import CoupledSamplesError as CoupledSamplesError
from superbatch.errors import OptimizerError as OptimizerError
from superbatch.keras import accumulate

BACKEND = keras.backend.backend()
# `matmul` of Keras' torch backend casts to float32 for any dtype of the model.
BOUND = {"tensorflow": 1e-12, "jax": 1e-12, "torch": 5e-6}[BACKEND]
Model = Any
draw = np.random.default_rng(0)
X, Y = draw.normal(size=(21, 3)), draw.normal(size=(21, 2))
TOKENS = draw.integers(1, 7, size=(14, 5)) * (np.arange(5) < draw.integers(1, 6, size=14)[:, None])
SOME = np.maximum(TOKENS, np.arange(5) == 0)  # no row is empty
TOKENS[[4, 5, 6, 7, 11, 12]] = 0  # two of seven micro-batches are padding, contiguous or strided
# The second of five micro-batches: rows 5 to 20 are strided on JAX.
SECOND = [6, 10, 14, 18] if BACKEND == "jax" else [5, 6, 7, 8]
LABELS = draw.integers(0, 3, size=(14, 5))


def array(value: Any) -> Any:
    """Return a tensor or variable as a NumPy array."""
    return np.array(keras.ops.convert_to_numpy(value), np.float64)


def values(variables: Any) -> dict[str, Any]:
    """Return arrays by index and path, without the numbers that Keras adds to layer names."""
    return {f"{number} {re.sub('_[0-9]+', '', v.path)}": array(v) for number, v in enumerate(variables)}


def dense(
    optimizer: Any = None, *, loss: Any = "mse", seed: int = 1, compiled: Any = None, **layer: Any
) -> Model:
    """Return a model of two layers with the same weights in every call."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="softsign", bias_initializer="random_normal", **layer)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="out")(hidden))
    model.compile(optimizer or keras.optimizers.SGD(0.3, momentum=0.9), loss=loss, **(compiled or {}))
    return model


class Lookup(keras.layers.Layer):
    """Embedding with a dense gradient.

    `keras.layers.Embedding` has a gradient of slices on TensorFlow. If a token occurs twice, Keras' Adam adds
    up the squares of the slices instead of squaring their sum, and so does its clipping.
    """

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(7, 4), name="embeddings")

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(keras.ops.one_hot(x, 7, dtype=self.kernel.dtype), self.kernel)

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return keras.ops.not_equal(x, 0)


def text(loss: Any, optimizer: Any = None, **compiled: Any) -> Model:
    """Return a classifier of tokens, with a mask from its embedding."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,), dtype="int32")
    hidden = Lookup()(inputs)
    hidden = keras.layers.Dense(4, activation="softsign")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile(optimizer or keras.optimizers.Adam(0.1), loss=loss, **compiled)
    return model


class SquaredError(keras.losses.Loss):
    """Squared error without Keras' `ops.mean`, which computes in float32 on JAX."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sum(keras.ops.square(y_pred - y_true), axis=-1)


def cross_entropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def assert_same(got: Any, wanted: Any, start: Any = None, bound: float | None = None) -> None:
    """Compare each array relative to its largest element; with `start`, assert that each has moved."""
    bound = BOUND if bound is None else bound
    assert got.keys() == wanted.keys()
    offenders = []
    for name, value in wanted.items():
        if start is not None:
            assert np.abs(value - start[name]).max() > 1e-3, f"the premise: {name} moved"
        error = np.abs(got[name] - value).max() / max(np.abs(value).max(), 1e-3)
        if not error <= bound:
            offenders.append(f"{name}: {error:.2e}")
    assert not offenders, offenders


def compare(
    build: Callable[[], Model],
    x: Any = X,
    y: Any = Y,
    *,
    microbatch_size: int = 5,
    bound: float | None = None,
    moves: bool = True,
    history: bool = True,
    options: Any = None,
    **fit: Any,
) -> Model:
    """Fit with whole batches and with micro-batches; compare weights, optimizer state and history."""
    fit = {"batch_size": 21, "epochs": 2, "shuffle": False, "verbose": 0} | fit
    whole = build()
    start = values(whole.trainable_variables)
    expected = whole.fit(x, y, **fit).history
    model = build()
    assert_same(values(model.trainable_variables), start, bound=0.0)
    ours = accumulate(model, microbatch_size=microbatch_size, **(options or {}))
    got = ours.fit(x, y, **fit).history
    assert_same(values(model.non_trainable_variables), values(whole.non_trainable_variables), bound=bound)
    trained = [values(each.trainable_variables) for each in (model, whole)]
    assert_same(*trained, start=start if moves else None, bound=bound)
    state = [values(each.optimizer.variables) for each in (model, whole)]
    assert_same(*state, bound=None if bound is None else 10 * bound)
    assert int(model.optimizer.iterations) > 0
    if history:
        assert expected.keys() == got.keys()
        assert_same(
            *({k: np.array(v) for k, v in h.items()} for h in (got, expected)), bound=max(BOUND, 1e-6)
        )
    return ours


def raises(kind: type[Exception], words: str, act: Callable[[], Any]) -> None:
    """Assert that the call raises `kind` with these words."""
    found = None
    try:
        act()
    except kind as error:
        found = str(error)
    assert found is not None, f"{kind.__name__} was not raised"
    assert words in found, found
