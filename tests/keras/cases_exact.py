# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""An update in micro-batches equals the update of the whole batch: optimizers, losses, masks, weights."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from superbatch.keras import accumulate
from tests.keras import helpers
from tests.keras.helpers import LABELS, SOME, TOKENS, X, Y, compare, cross_entropy, dense, draw, text

WEIGHTS = np.abs(draw.normal(size=21)) + 0.1
optimizers = keras.optimizers


def case_adam_schedule_clip_and_regularizer() -> None:
    def build() -> Any:
        rate = optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])
        adam = optimizers.Adam(rate, global_clipnorm=0.2)
        regularizers = {"kernel_regularizer": "l2", "activity_regularizer": "l2"}
        return dense(adam, compiled={"metrics": ["mae"], "weighted_metrics": ["mse"]}, **regularizers)

    compare(build, sample_weight=WEIGHTS, validation_data=(X[:5], Y[:5]), batch_size=8, microbatch_size=3)


def case_ema_that_overwrites_and_a_constraint() -> None:
    def build() -> Any:
        sgd = optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2)
        return dense(sgd, kernel_constraint=keras.constraints.MaxNorm(0.5))

    compare(build)


def case_clipnorm_and_weight_decay() -> None:
    compare(lambda: dense(optimizers.AdamW(0.1, clipnorm=0.1, weight_decay=0.1)), microbatch_size=1)


def case_clipvalue() -> None:
    compare(lambda: dense(optimizers.SGD(0.5, clipvalue=0.05)), microbatch_size=5)


def case_a_microbatch_as_large_as_the_batch() -> None:
    compare(dense, microbatch_size=100, epochs=1)


def case_class_weights_and_accuracy() -> None:
    y = (Y[:, :1] > 0).astype(int)

    def build() -> Any:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return dense(loss=loss, compiled={"metrics": ["accuracy"]})

    compare(build, y=y, class_weight={0: 1.0, 1: 4.0})


def case_masked_tokens() -> None:
    # On JAX Keras' own train step passes no mask to the metrics (`evaluate` does).
    metrics = {} if helpers.BACKEND == "jax" else {"metrics": ["accuracy"]}
    compare(lambda: text(cross_entropy(), **metrics), TOKENS, LABELS, microbatch_size=2, batch_size=14)


def case_masked_tokens_sample_weights_and_clip() -> None:
    weights = np.abs(draw.normal(size=TOKENS.shape))
    adam = lambda: optimizers.Adam(0.1, global_clipnorm=0.1)  # noqa: E731
    build = lambda: text(cross_entropy(), adam())  # noqa: E731
    compare(build, TOKENS, LABELS, microbatch_size=2, batch_size=14, sample_weight=weights)


def case_masked_tokens_beside_a_regularizer() -> None:
    """A mean over tokens plus a mean over rows; the tokens are counted first."""

    def build() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,), dtype="int32")
        hidden = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
        hidden = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
        model.compile(optimizers.SGD(0.5, momentum=0.9), loss=cross_entropy())
        return model

    compare(build, TOKENS, LABELS, microbatch_size=2, batch_size=14)


def case_a_mean_over_sample_weights() -> None:
    loss = lambda: helpers.SquaredError(reduction="mean_with_sample_weight")  # noqa: E731
    weights = WEIGHTS * (np.arange(21) > 4)  # one micro-batch has weight 0
    assert not weights[:5].any()
    compare(lambda: dense(loss=loss()), sample_weight=weights)


def case_sequences_of_one_feature() -> None:
    """TensorFlow does not know the shape of one gradient at tracing."""

    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5, 1)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(optimizers.SGD(0.3), loss=helpers.SquaredError())
        return model

    x = draw.normal(size=(14, 5, 1))
    compare(build, x, x**2, batch_size=14)


def case_a_sum() -> None:
    loss = lambda: keras.losses.MeanSquaredError(reduction="sum")  # noqa: E731
    build = lambda: dense(optimizers.SGD(0.02), loss=loss())  # noqa: E731
    compare(build, sample_weight=WEIGHTS)


def case_an_ignored_class() -> None:
    labels = np.where(TOKENS == 0, -1, LABELS)
    build = lambda: text(cross_entropy(ignore_class=-1))  # noqa: E731
    compare(build, TOKENS, labels, microbatch_size=2, batch_size=14)


def several(**compiled: Any) -> Any:
    """Return a model with named inputs and outputs; one output has a mask, one has none."""
    keras.utils.set_random_seed(1)
    tokens, features = keras.Input((5,), dtype="int32", name="tokens"), keras.Input((3,), name="features")
    hidden = helpers.Lookup()(tokens)
    classes = keras.layers.Dense(3, name="classes")(hidden)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    joined = keras.layers.Concatenate()([pooled, keras.layers.Dense(4)(features)])
    number = keras.layers.Dense(2, name="number")(joined)
    model = keras.Model({"tokens": tokens, "features": features}, {"classes": classes, "number": number})
    model.compile(optimizers.Adam(0.1), **compiled)
    return model


def case_several_outputs_with_a_mask_and_weights_each() -> None:
    x, y = {"tokens": SOME, "features": X[:14]}, {"classes": LABELS, "number": Y[:14]}
    weights = {"classes": np.abs(draw.normal(size=(14, 5))), "number": WEIGHTS[:14]}
    build = lambda: several(  # noqa: E731
        loss={"classes": cross_entropy(), "number": keras.losses.Huber(reduction="mean_with_sample_weight")},
        loss_weights={"classes": 0.3, "number": 2.0},
        metrics={"number": ["mae"]},
    )
    ours = compare(build, x, y, microbatch_size=2, batch_size=14, sample_weight=weights, history=False)
    assert {"loss", "classes_loss", "number_loss", "number_mae"} <= set(ours.history.history)


def case_losses_of_several_outputs_in_the_history() -> None:
    x, y = {"tokens": SOME, "features": X[:14]}, {"classes": LABELS, "number": Y[:14]}
    build = lambda: several(loss={"classes": cross_entropy(), "number": "mse"})  # noqa: E731
    compare(build, x, y, microbatch_size=3, batch_size=14)


class Halving(keras.losses.Loss):
    """Loss that returns one number: the mean over targets that are not padding."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        known = ops.cast(y_true > -1, y_pred.dtype)
        return ops.sum(known * (y_pred - y_true) ** 2) / ops.sum(known)


def count_known(x: Any, y: Any, sample_weight: Any) -> Any:
    return ops.sum(ops.cast(y > -1, "float32"))


def case_a_loss_that_returns_one_number() -> None:
    y = Y.copy()
    y[helpers.SECOND] = -1  # 0 / 0 in this micro-batch
    compare(lambda: dense(loss=Halving()), y=y, options={"loss_weight": count_known})


def case_a_loss_of_each_element() -> None:
    """The loss returns several numbers for each row."""
    elements = lambda y_true, y_pred: ops.reshape((y_true - y_pred) ** 2, (-1,))  # noqa: E731
    compare(lambda: dense(loss=elements))


class Own(keras.Model):
    """Model with its own `compute_loss` and its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_regularizer="l2")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x) * (1.5 if training else 1.0)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        rows = ops.cast(ops.shape(y)[0], y_pred.dtype)
        return ops.sum((y_pred - y) ** 2) / rows + sum(self.losses)


def case_an_own_compute_loss() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = Own()
        model(X[:1])
        model.compile(optimizers.SGD(0.3))
        return model

    rows = lambda x, y, sample_weight: ops.shape(y)[0]  # noqa: E731
    compare(build, options={"loss_weight": rows})


def case_weights_without_a_gradient_and_frozen_layers() -> None:
    class Unused(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.unused = self.add_weight(shape=(2,), initializer="ones", name="unused")

        def call(self, x: Any) -> Any:
            return x

    def build() -> Any:
        keras.utils.set_random_seed(1)
        frozen = keras.layers.Dense(3, trainable=False)
        layers = [keras.Input((3,)), frozen, Unused(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(optimizers.SGD(0.3, weight_decay=None), loss="mse")
        return model

    assert len(build().trainable_variables) == 3, "the premise: one of them is unused"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")  # Keras warns for the whole batch too
        ours = compare(build, moves=False)
    assert helpers.array(ours.trainable_variables[0]).tolist() == [1.0, 1.0]


def case_a_model_that_is_built_by_fit() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4, activation="softsign"), keras.layers.Dense(2)])
        model.compile(optimizers.SGD(0.3), loss="mse")
        return model

    whole, model = build(), build()
    keras.utils.set_random_seed(2)
    whole.fit(X, Y, batch_size=21, epochs=2, shuffle=False, verbose=0)
    ours = helpers.accumulate(model, microbatch_size=3)
    keras.utils.set_random_seed(2)
    ours.fit(X, Y, batch_size=21, epochs=2, shuffle=False, verbose=0)
    got, wanted = ([helpers.array(v) for v in each.trainable_variables] for each in (ours, whole))
    assert all(np.abs(a - b).max() < 10 * helpers.BOUND for a, b in zip(got, wanted, strict=True))
    assert np.abs(helpers.array(model(X)) - helpers.array(whole(X))).max() < 10 * helpers.BOUND


class Inferring(keras.Model):
    """Model whose `call` uses BatchNormalization in inference mode, also in `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.dense = keras.layers.Dense(2)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.dense(self.norm(x, training=False))


def inferring() -> Any:
    keras.utils.set_random_seed(1)
    model = Inferring()
    model.build((None, 3))
    model.norm.set_weights(np.array([[1, 2, 0.5], [0.1, -0.2, 0.3], [0.5, 0, -0.5], [2, 1, 0.5]]))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def graph_with(layer: Any, **call: Any) -> Any:
    """Return a functional model whose first layer is called with these arguments."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(2)(layer(inputs, **call)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def case_batchnorm_in_inference_mode() -> None:
    # On JAX these layers cast to float32, so the gradients of their weights are sums in float32.
    bound = 1e-6 if helpers.BACKEND == "jax" else helpers.BOUND
    compare(inferring, options={"batchnorm": "per_microbatch"}, bound=bound)

    def frozen_after_compile() -> Any:
        model = graph_with(keras.layers.BatchNormalization(name="norm"))
        model.get_layer("norm").trainable = False
        return model

    compare(frozen_after_compile, bound=bound)
    compare(lambda: graph_with(keras.layers.LayerNormalization()), bound=bound)
    compare(lambda: graph_with(keras.layers.GroupNormalization(1)), bound=bound)


def case_batchnorm_of_a_functional_model_trains_despite_training_false() -> None:
    """`fit` runs a functional model with training=True, which replaces the False given to the layer."""

    def build() -> Any:
        return graph_with(keras.layers.BatchNormalization(name="norm"), training=False)

    helpers.raises(
        helpers.CoupledSamplesError,
        "BatchNormalization in training (norm)",
        lambda: accumulate(build(), microbatch_size=5),
    )
    whole, model = build(), build()
    fit = {"batch_size": 21, "epochs": 2, "shuffle": False, "verbose": 0}
    whole.fit(X, Y, **fit)
    accumulate(model, microbatch_size=5, batchnorm="per_microbatch").fit(X, Y, **fit)
    moved, means = (helpers.array(each.get_layer("norm").moving_mean) for each in (whole, model))
    assert np.abs(moved).max() > 1e-3, "the premise: Keras trained the layer"
    bound = 1e-6 if helpers.BACKEND == "jax" else helpers.BOUND  # the layer computes in float32 on JAX
    assert np.abs(means - moved).max() < bound * np.abs(moved).max()
    kernels = [helpers.array(each.layers[-1].kernel) for each in (whole, model)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4, (
        "BatchNormalization uses statistics of the micro-batch"
    )
