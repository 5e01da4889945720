# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""A micro-batch with weight 0 for one loss (0 / 0) but not for another term gives the update of the batch.

The bound is 1e-12 in float64 on every backend: the models use the backend's own `matmul`.
"""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
from keras import ops

from superbatch.keras import accumulate, taking
from tests.contract.keras_model import native
from tests.keras import helpers
from tests.keras.cases_exact import Halving, count_known
from tests.keras.cases_mutants import rejects
from tests.keras.helpers import LABELS, TOKENS, X, Y, array, compare, cross_entropy, dense

EXACT = 1e-12
SGD = keras.optimizers.SGD
PADDED = Y.copy()
PADDED[helpers.SECOND] = -1  # this micro-batch has no target: 0 / 0
STATED = {"loss_weight": count_known}


class Linear(keras.layers.Layer):
    """``x w + b`` in the dtype of x; adds the mean over rows of its squared outputs to the loss."""

    def __init__(self, units: int, penalty: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.units, self.penalty = units, penalty

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="random_normal", name="bias")

    def call(self, x: Any) -> Any:
        kernel, bias = (ops.convert_to_tensor(variable) for variable in (self.kernel, self.bias))
        y = native()[0](x, kernel) + bias
        if self.penalty:
            self.add_loss(self.penalty * ops.sum(y**2) / ops.cast(ops.shape(y)[0], y.dtype))
        return y


def penalised(loss: Any = None, optimizer: Any = None, *, penalty: float = 0.1, **compiled: Any) -> Any:
    """Return a model with an `add_loss` beside its loss."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    hidden = native_softsign(Linear(4, penalty)(inputs))
    model = keras.Model(inputs, Linear(2)(hidden))
    model.compile(optimizer or SGD(0.3, momentum=0.9), loss=loss or Halving(), **compiled)
    return model


def native_softsign(x: Any) -> Any:
    return x / (1.0 + ops.abs(x))


def assert_premise(y: Any) -> None:
    """Assert that a micro-batch has weight 0, so that its own loss and gradient are NaN."""
    with np.errstate(invalid="ignore"):
        known = (y[helpers.SECOND] > -1).sum()
        assert known == 0 and np.isnan(np.float64(0) / known) and (y > -1).any()


def case_beside_an_add_loss() -> None:
    assert_premise(PADDED)
    compare(penalised, y=PADDED, options=STATED, bound=EXACT)


def case_beside_an_activity_regularizer() -> None:
    """The bound is looser on torch, where Keras computes the regularizer in float32."""
    compare(lambda: dense(loss=Halving(), activity_regularizer="l2"), y=PADDED, options=STATED)


def case_compiled_and_eagerly_beside_an_add_loss() -> None:
    for way in ({"run_eagerly": True}, {"jit_compile": helpers.BACKEND == "tensorflow"}):
        compare(lambda way=way: penalised(**way), y=PADDED, options=STATED, bound=EXACT)


def case_beside_an_add_loss_with_a_scaled_loss() -> None:
    scaled = lambda: penalised(optimizer=SGD(0.3, loss_scale_factor=128.0))  # noqa: E731
    compare(scaled, y=PADDED, options=STATED, bound=EXACT)


def two_outputs(first: Any, second: Any, **compiled: Any) -> Any:
    """Return a model with two outputs of one hidden layer: a wrong gradient of one affects the other."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    hidden = native_softsign(Linear(4)(inputs))
    outputs = {"first": Linear(2, name="first")(hidden), "second": Linear(2, name="second")(hidden)}
    model = keras.Model(inputs, outputs)
    model.compile(SGD(0.3, momentum=0.9), loss={"first": first, "second": second}, **compiled)
    return model


def count_first(x: Any, y: Any, sample_weight: Any) -> Any:
    return count_known(x, y["first"], sample_weight)


def case_beside_another_output() -> None:
    mean = EXACT if helpers.BACKEND != "torch" else helpers.BOUND  # Keras divides in float32 there
    for second, bound in (
        (helpers.SquaredError(), mean),
        (helpers.SquaredError(reduction="sum"), EXACT),
    ):
        build = lambda second=second: two_outputs(  # noqa: E731
            Halving(), second, loss_weights={"first": 1.0, "second": 0.01}
        )
        compare(
            build,
            y={"first": PADDED, "second": Y},
            options={"loss_weight": count_first},
            bound=bound,
            history=False,
        )


def case_beside_a_mask_with_another_divisor() -> None:
    """One output has a mask of tokens, the other a declared weight: two divisors."""

    def build() -> Any:
        keras.utils.set_random_seed(1)
        tokens, features = keras.Input((5,), dtype="int32"), keras.Input((3,))
        words = helpers.Lookup()(tokens)
        joined = Linear(4)(features)
        classes = keras.layers.Dense(3)(words * joined[:, None, :])
        model = keras.Model([tokens, features], [classes, Linear(2)(joined)])
        model.compile(SGD(0.3, momentum=0.9), loss=[cross_entropy(), Halving()])
        return model

    y = Y[:14].copy()
    y[[0, 1, 2, 5, 10]] = -1
    tokens, numbers = (TOKENS > 0).any(axis=1), (y > -1).any(axis=1)
    assert {*zip(tokens.tolist(), numbers.tolist(), strict=True)} == {
        *itertools.product((True, False), repeat=2)
    }
    count = lambda x, y, sample_weight: count_known(x, y[1], sample_weight)  # noqa: E731
    compare(
        build,
        [TOKENS, X[:14]],
        [LABELS, y],
        microbatch_size=1,
        batch_size=14,
        options={"loss_weight": count},
        history=False,
    )


class Nothing(keras.losses.Loss):
    """Loss of a batch without targets: 0."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.sum(y_pred, axis=-1) * 0


def case_a_window_of_weight_zero() -> None:
    """The loss is 0 / 0 in every micro-batch; only the other term updates the model."""
    nothing = np.full_like(Y, -1.0)
    expected = penalised(Nothing())
    expected.fit(X, nothing, batch_size=21, epochs=2, shuffle=False, verbose=0)
    model = penalised()
    start = helpers.values(model.trainable_variables)
    ours = accumulate(model, microbatch_size=5, **STATED)
    history = ours.fit(X, nothing, batch_size=21, epochs=2, shuffle=False, verbose=0).history
    got, wanted = (helpers.values(each.trainable_variables) for each in (model, expected))
    helpers.assert_same(got, wanted, bound=EXACT)
    assert max(np.abs(wanted[name] - start[name]).max() for name in wanted) > 1e-3, "the premise"
    assert np.isfinite(history["loss"]).all() and int(model.optimizer.iterations) == 2


def case_a_window_of_weight_zero_without_another_term() -> None:
    model = penalised(penalty=0.0)
    start = helpers.values(model.weights)
    accumulate(model, microbatch_size=5, **STATED).fit(X, np.full_like(Y, -1.0), batch_size=21, verbose=0)
    helpers.assert_same(helpers.values(model.weights), start, bound=0.0)
    assert int(model.optimizer.iterations) == 0


def case_nan_in_a_counted_row_reaches_the_update() -> None:
    """Only rows of weight 0 are left out: a NaN in a row with weight is in the update."""
    y = Y.copy()
    y[6] = np.nan
    for loss, options in ((Halving(), {"loss_weight": lambda x, y, w: ops.shape(y)[0]}), ("mse", {})):
        model = penalised(loss)
        accumulate(model, microbatch_size=5, check=False, **options).fit(X, y, batch_size=21, verbose=0)
        assert np.isnan(array(model.weights[0])).any()


def case_mutant_zero_times_nan_beside_another_term() -> None:
    def eagerly() -> None:
        """Run eagerly: compiled by XLA, 0 x NaN may be 0."""
        build = lambda: penalised(run_eagerly=True)  # noqa: E731
        compare(build, y=PADDED, epochs=1, options=STATED, bound=EXACT)

    eagerly()
    rejects(taking, "without_gradient_of_nothing", lambda y_pred, weight: y_pred, eagerly)
