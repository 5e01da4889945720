# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Numbers of an accumulating model: random draws, BatchNormalization, empty batches, precision."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from superbatch.keras import accumulate
from tests.keras import helpers
from tests.keras.helpers import (
    LABELS,
    TOKENS,
    X,
    Y,
    array,
    assert_same,
    compare,
    cross_entropy,
    dense,
    text,
    values,
)

SGD = keras.optimizers.SGD


class Draw(keras.layers.Layer):
    """Multiply by a random number drawn once per call."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(3)

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="zeros", name="scale")

    def call(self, x: Any) -> Any:
        return self.scale * keras.random.uniform((), seed=self.generator) * ops.ones_like(x[:, :1])


class Itself(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.sum(y_pred, axis=-1)


def case_random_numbers_differ_between_microbatches() -> None:
    model = keras.Sequential([keras.Input((3,)), Draw()])
    model.compile(SGD(1.0), loss=Itself())
    accumulate(model, microbatch_size=7).fit(X, Y, batch_size=21, verbose=0)
    generator = keras.random.SeedGenerator(3)
    draws = [float(keras.random.uniform((), seed=generator)) for _ in range(3)]
    assert len(set(draws)) == 3, "the premise"
    assert abs(-float(array(model.weights[0])) - np.mean(draws)) < 1e-6


def normed(**options: Any) -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    norm = keras.layers.BatchNormalization(momentum=0.8, name="norm")
    model = keras.Model(inputs, keras.layers.Dense(2)(norm(inputs)))
    norm.trainable = options.get("trainable", True)
    model.compile(SGD(0.1), loss="mse")
    return model


def case_batchnorm() -> None:
    helpers.raises(
        helpers.CoupledSamplesError,
        'pass batchnorm="per_microbatch" to train with the statistics of micro-batches',
        lambda: accumulate(normed(), microbatch_size=4),
    )
    x = X * np.linspace(1, 4, 21)[:, None] + np.arange(21)[:, None] / 5
    whole, model = normed(), normed()
    whole.fit(x, Y, batch_size=21, epochs=2, verbose=0, shuffle=False)
    ours = accumulate(model, microbatch_size=6, batchnorm="per_microbatch")
    ours.fit(x, Y, batch_size=21, epochs=2, verbose=0, shuffle=False)
    moving = [values(each.get_layer("norm").non_trainable_variables) for each in (model, whole)]
    start = {name: np.zeros_like(value) for name, value in moving[1].items()}
    # The inputs of this layer are the data, so its moving statistics equal those of the whole batch.
    assert_same(*moving, start, bound=max(helpers.BOUND, 1e-6 if helpers.BACKEND == "jax" else 0))
    kernels = [array(each.layers[-1].kernel) for each in (model, whole)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4, "the premise: it normalised by micro-batches"


def case_frozen_batchnorm_is_exact() -> None:
    compare(lambda: normed(trainable=False))


def case_a_batch_of_weight_zero() -> None:
    model = text(cross_entropy(), SGD(0.5, momentum=0.9))
    ours = accumulate(model, microbatch_size=4)
    ours.train_on_batch(TOKENS, LABELS)
    before, state = values(model.weights), values(model.optimizer.variables)
    ours.train_on_batch(np.zeros_like(TOKENS), LABELS)
    assert_same(values(model.weights), before, bound=0.0)
    assert_same(values(model.optimizer.variables), state, bound=0.0)
    assert int(model.optimizer.iterations) == 1


def case_a_microbatch_that_is_not_finite() -> None:
    x = X.copy()
    x[6] = np.nan
    kept = [row for row in range(21) if row not in helpers.SECOND]
    whole, model = (dense(loss=helpers.SquaredError(), compiled={"metrics": ["mae"]}) for _ in range(2))
    expected = whole.fit(x[kept], Y[kept], batch_size=21, verbose=0).history
    ours = accumulate(model, microbatch_size=5, nonfinite="skip_microbatch")
    got = ours.fit(x, Y, batch_size=21, verbose=0, shuffle=False).history
    assert_same(values(model.weights), values(whole.weights))
    assert all(abs(got[name][0] - expected[name][0]) < 1e-5 for name in ("loss", "mae")), (got, expected)
    spoilt = dense()
    accumulate(spoilt, microbatch_size=5).fit(x, Y, batch_size=21, verbose=0)
    assert np.isnan(array(spoilt.weights[0])).any(), "the premise"


def case_mixed_float16() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    x, y = X.astype("float32"), Y.astype("float32")
    scaled = lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=128)  # noqa: E731
    ours = compare(lambda: dense(scaled()), x, y, bound=2e-2, history=False, moves=False)
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer), "the premise"
    scale = float(ours.optimizer.dynamic_scale)
    before = values(ours.weights)
    ours.train_on_batch(np.where(np.arange(21)[:, None] == 6, 1e30, x), y)
    assert_same(values(ours.weights), before, bound=0.0)
    assert float(ours.optimizer.dynamic_scale) == scale / 2


def case_mixed_float16_counts_tokens_without_overflow() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    ours = compare(
        lambda: text(cross_entropy(), SGD(0.1)),
        TOKENS,
        LABELS,
        bound=5e-3,
        moves=False,
        history=False,
        batch_size=14,
    )
    assert int(ours.optimizer.iterations) == 2, "an update was skipped because of an overflow"


def case_sums_of_bfloat16_are_float32() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("bfloat16")
    x = np.full((512, 1), 0.0029907226562, "float32")
    x[0] = 1.0
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(SGD(1.0), loss=Itself())
    assert "bfloat16" in str(model.weights[0].dtype), "the premise"
    accumulate(model, microbatch_size=1).fit(x, x, batch_size=512, verbose=0)
    assert abs(-float(array(model.weights[0]).item()) / x.mean() - 1) < 2**-8


def case_compiled_or_eagerly() -> None:
    whole = dense()
    whole.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    ways: list[dict[str, Any]] = [{"run_eagerly": True}]
    if helpers.BACKEND != "torch":  # torch would need a C++ compiler
        ways += [{"jit_compile": helpers.BACKEND == "tensorflow"}, {"steps_per_execution": 2}]
    for way in ways:
        model = dense(compiled=way)
        ours = accumulate(model, microbatch_size=3)
        ours.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
        assert ours.jit_compile is way.get("jit_compile", ours.jit_compile)
        assert_same(values(model.weights), values(whole.weights))


def case_a_sparse_gradient() -> None:
    """Gradients are slices on TensorFlow; with momentum Keras updates them correctly."""

    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Embedding(7, 4), keras.layers.Dense(3)])
        model.compile(SGD(1.0, momentum=0.9), loss=cross_entropy())
        return model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting sparse IndexedSlices")
        compare(build, TOKENS, LABELS, batch_size=14, moves=False)
