# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""A table of programs, each compared with Keras' own fit of the whole batch: exact, or refused.

A program refused by the check must be wrong without the check, so that no error is a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from superbatch.errors import CoupledSamplesError, InputError, LossSpecError, SplitError
from superbatch.keras import accumulate, comparison, probe
from tests.keras import helpers, programs
from tests.keras.cases_mutants import rejects
from tests.keras.helpers import compare, raises
from tests.keras.programs import (
    BINARY,
    KNOWN,
    LABELS,
    ROWS,
    SHARES,
    Adds,
    Program,
    X,
    Y,
    count_known,
    count_rows,
    mlp,
)

layers, losses = keras.layers, keras.losses
FIT = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
BY_ROWS, BY_KNOWN = {"loss_weight": count_rows}, {"loss_weight": count_known}
SIZE = 4


def exact(program: Program, *, in_float32: bool = False) -> None:
    # Several losses and layers of Keras compute in float32 on JAX and torch for any input dtype.
    bound = None if helpers.BACKEND == "tensorflow" and not in_float32 else 5e-6
    same = {"options": program.options, "bound": bound, "moves": False, "microbatch_size": SIZE}
    compare(program.build, program.x, program.y, **same, **(FIT | program.fit))


def difference(program: Program) -> float:
    """Return the largest difference from the whole batch without the check, relative to the update."""
    whole, model = program.build(), program.build()
    start = helpers.values(whole.trainable_variables)
    whole.fit(program.x, program.y, **(FIT | program.fit))
    ours = accumulate(model, microbatch_size=SIZE, **(program.options | {"check": False}))
    ours.fit(program.x, program.y, **(FIT | program.fit))
    got, wanted = (helpers.values(each.trainable_variables) for each in (model, whole))
    moved = max(np.abs(wanted[name] - start[name]).max() for name in wanted)
    return max(np.abs(got[name] - wanted[name]).max() for name in wanted) / moved


def refused(program: Program, kind: type[Exception], words: str, *, wrong: bool = True) -> None:
    ours = accumulate(program.build(), microbatch_size=SIZE, **program.options)
    raises(kind, words, lambda: ours.fit(program.x, program.y, **(FIT | program.fit)))
    assert int(ours.optimizer.iterations) == 0, "before the first update"
    if wrong:
        found = difference(program)
        assert found > 1e-3, f"the premise: it is wrong without the check ({words}, {found})"


EXACT_LOSSES = {
    losses.MeanSquaredError: Y,
    losses.MeanAbsoluteError: Y,
    losses.MeanAbsolutePercentageError: Y,
    losses.MeanSquaredLogarithmicError: Y,
    losses.CosineSimilarity: Y,
    losses.Huber: Y,
    losses.LogCosh: Y,
    losses.Hinge: BINARY,
    losses.SquaredHinge: BINARY,
    losses.CategoricalHinge: BINARY,
    losses.KLDivergence: SHARES,
    losses.Poisson: Y,
    losses.BinaryCrossentropy: BINARY,
    losses.BinaryFocalCrossentropy: BINARY,
    losses.CategoricalCrossentropy: SHARES,
    losses.CategoricalFocalCrossentropy: SHARES,
    losses.SparseCategoricalCrossentropy: LABELS,
    losses.CategoricalGeneralizedCrossEntropy: LABELS,
    losses.CTC: None,  # in its own case
    losses.Dice: BINARY,  # with an axis for each sample
    losses.Tversky: BINARY,
}
REFUSED_LOSSES = {losses.Circle: LABELS, losses.Dice: BINARY, losses.Tversky: BINARY}


def with_loss(loss: Any, y: Any, **options: Any) -> Program:
    return Program(lambda: mlp(loss=loss, activation="sigmoid"), y=y, **options)


def case_every_loss_of_keras_is_in_the_table() -> None:
    known = {
        each
        for each in vars(losses).values()
        if isinstance(each, type) and issubclass(each, losses.Loss) and each is not losses.Loss
    }
    assert known == {*EXACT_LOSSES, *REFUSED_LOSSES}


def case_losses_of_keras_that_are_exact() -> None:
    for kind, y in EXACT_LOSSES.items():
        if y is not None:
            loss = kind(axis=(1,)) if kind in REFUSED_LOSSES else kind()
            exact(with_loss(loss, y))


def case_ctc() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6, 3))
        return programs.functional(inputs, layers.Dense(4)(inputs), losses.CTC())

    labels = np.tile([[1, 2], [3, 1], [2, 2]], (ROWS // 3, 1))
    exact(Program(build, programs.SEQUENCES, labels), in_float32=True)  # as TensorFlow's CTC does


def case_losses_of_keras_that_are_refused_by_name() -> None:
    """They are refused also with a weight and without the check."""
    circle = "compares each row with all other rows of the batch, but a micro-batch has only some of them"
    for check in (True, False):
        for options in ({}, BY_ROWS):
            given = {"options": options | {"check": check}}
            for loss in (losses.Circle(), losses.Circle(reduction="sum"), "circle"):
                refused(with_loss(loss, LABELS, **given), CoupledSamplesError, circle, wrong=False)
            for loss, name in (
                (losses.Dice(), "Dice"),
                (losses.Dice(axis=(0, 1)), "Dice"),
                ("dice", "Dice"),
                (losses.Tversky(axis=0), "Tversky"),
            ):
                words = f"Compile keras.losses.{name}(axis=(1,)): one ratio for each sample"
                refused(with_loss(loss, BINARY, **given), LossSpecError, words, wrong=False)


def case_reductions() -> None:
    weights = {"fit": {"sample_weight": np.arange(ROWS) + 1.0}}
    for fit in ({}, weights):
        for reduction in ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"):
            exact(with_loss(losses.MeanSquaredError(reduction=reduction), Y, **fit))
        for reduction in (None, "none"):
            each = with_loss(losses.MeanSquaredError(reduction=reduction), Y, **fit)
            refused(each, LossSpecError, 'Give the loss reduction="sum_over_batch_size"', wrong=False)


COUPLED_LAYERS: dict[str, Callable[[], Any]] = {
    "Centre": programs.Centre,
    "Standardise": programs.Standardise,
    "AcrossRows": programs.AcrossRows,
    "ZeroGate": programs.ZeroGate,
    "UnitNormalization": lambda: layers.UnitNormalization(axis=0),
    "Softmax": lambda: layers.Softmax(axis=0),
    "Lambda": lambda: layers.Lambda(lambda x: x - ops.mean(x, axis=0)),
}


def coupled(name: str) -> None:
    words = f"The output of {name} "
    refused(Program(lambda: mlp(COUPLED_LAYERS[name])), CoupledSamplesError, words)


def case_a_layer_that_centres_over_the_batch() -> None:
    coupled("Centre")


def case_layers_that_couple_rows() -> None:
    for name in COUPLED_LAYERS:
        coupled(name)


def case_as_many_columns_as_rows() -> None:
    """Shapes that depend on the micro-batch give an error of superbatch, not of the framework."""
    refused(Program(programs.attending), CoupledSamplesError, "The output of Scores ")
    scored = Program(lambda: programs.attending(programs.among_the_batch))
    for size in (4, 5):  # equal micro-batches, and unequal ones
        ours = accumulate(scored.build(), microbatch_size=size)
        words = "The loss 'among_the_batch' of a row depends on the other rows of the batch: it is "
        raises(CoupledSamplesError, words, lambda ours=ours: ours.fit(scored.x, scored.y, **FIT))
    assert difference(scored) > 1e-3, "the premise: it is wrong without the check"


def case_a_coupled_layer_of_a_subclassed_model() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers.Dense(3), layers.Dense(programs.CLASSES)
            self.centre = programs.Centre()

        def build(self, shape: Any) -> None:
            self.first.build(shape)
            self.last.build((None, 3))

        def call(self, x: Any) -> Any:
            return self.last(self.centre(ops.tanh(self.first(x))))

    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = Own()
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.3), "mse")
        return model

    refused(Program(build), CoupledSamplesError, "The output of Centre ")


def case_layers_that_do_not_couple_rows() -> None:
    for layer in (
        lambda: layers.GroupNormalization(5),
        layers.LayerNormalization,
        layers.RMSNormalization,
        layers.UnitNormalization,
        lambda: layers.ActivityRegularization(l1=0.1, l2=0.1),
        lambda: Adds(lambda x: ops.mean(x**2)),
        lambda: Adds(lambda x: ops.sum(x**2) / ops.cast(ops.shape(x)[0], x.dtype)),
        lambda: Adds(lambda x: 0.1 * ops.ones((), x.dtype)),
    ):
        exact(Program(lambda layer=layer: mlp(layer)))


def case_models_that_are_exact() -> None:
    exact(Program(programs.recurrent, programs.SEQUENCES))
    exact(Program(programs.images, programs.IMAGES))
    exact(Program(programs.without_targets, y=None))
    exact(Program(programs.unused, y={"used": Y}))
    exact(Program(lambda: mlp(loss=[losses.Huber()], loss_weights=[0.5])))


def case_random_layers_are_not_called_coupled() -> None:
    """Random layers train; `cases_numbers` tests that their draws differ."""
    for build, x in (
        (lambda: mlp(lambda: layers.Dropout(0.5)), X),
        (lambda: mlp(lambda: layers.GaussianNoise(0.1), lambda: layers.AlphaDropout(0.2)), X),
        (lambda: mlp(programs.Sampled), X),
        (lambda: mlp(programs.DrawsByItself), X),
        (lambda: programs.recurrent(dropout=0.3, recurrent_dropout=0.2), programs.SEQUENCES),
    ):
        model = build()
        accumulate(model, microbatch_size=SIZE).fit(x, Y, **FIT)
        assert int(model.optimizer.iterations) == 2
    source = keras.src.backend.random
    assert all(
        getattr(source, name).__module__ == source.__name__ for name in ("normal", "dropout", "shuffle")
    )


def case_batchnorm_per_microbatch_is_accepted() -> None:
    model = programs.normed()
    accumulate(model, microbatch_size=SIZE, batchnorm="per_microbatch").fit(X, Y, **FIT)
    assert int(model.optimizer.iterations) == 2
    centred = Program(
        lambda: mlp(layers.BatchNormalization, programs.Centre), options={"batchnorm": "per_microbatch"}
    )
    refused(centred, CoupledSamplesError, "The output of Centre ")


def case_a_layer_whose_state_changes_in_each_forward() -> None:
    words = "rows at once leave another value than micro-batches of"
    program = Program(lambda: mlp(programs.Counts))
    refused(program, InputError, words, wrong=False)
    states = []
    for size in (SIZE, ROWS):
        model = program.build()
        accumulate(model, microbatch_size=size, check=False).fit(X, Y, **FIT)
        states.append(helpers.array(model.non_trainable_variables[0]))
    assert np.abs(states[0] - states[1]).max() > 1e-3, "the premise: the state differs without the check"
    exact(Program(lambda: mlp(programs.SetsAConstant)))


def case_losses_that_couple_rows() -> None:
    for loss in (programs.contrastive, programs.against_the_mean):
        words = f"The loss {loss.__name__!r} of a row depends on the other rows of the batch: it is "
        refused(with_loss(loss, Y), CoupledSamplesError, words)


def case_pairs_of_neighbours() -> None:
    """Exact if micro-batches contain whole pairs; on JAX they contain every k-th row."""
    neighbours = with_loss(programs.pairs, Y)
    if helpers.BACKEND == "jax":
        refused(neighbours, CoupledSamplesError, "The loss 'pairs' of a row depends on the other rows")
    else:
        exact(neighbours)


def case_declared_weights() -> None:
    exact(with_loss(programs.known_mean, KNOWN, options=BY_KNOWN))
    exact(with_loss(programs.known_each, KNOWN))
    divisor = "The loss 'known_mean' is not divided by loss_weight: it is "
    refused(with_loss(programs.known_mean, KNOWN, options=BY_ROWS), LossSpecError, divisor)
    a_sum = "It is a sum: return one number for each sample from a loss with reduction"
    refused(with_loss(programs.known_sum, KNOWN, options=BY_KNOWN), LossSpecError, a_sum)
    by_rows = "It is a mean over rows: pass loss_weight=lambda x, y, sample_weight: keras.ops.shape(y)[0]"
    mean = lambda y_true, y_pred: ops.mean((y_true - y_pred) ** 2)  # noqa: E731
    refused(with_loss(mean, KNOWN, options=BY_KNOWN), LossSpecError, by_rows)


def case_an_overridden_compute_loss() -> None:
    exact(Program(lambda: programs.own(programs.squares), options=BY_ROWS))
    words = "The loss 'compute_loss' is not divided by loss_weight"
    coupled = Program(lambda: programs.own(programs.contrastive), options=BY_ROWS)
    refused(coupled, LossSpecError, words)
    known = Program(lambda: programs.own(programs.known_mean), y=KNOWN, options=BY_ROWS)
    refused(known, LossSpecError, words)
    none = Program(lambda: programs.own(programs.squares))
    refused(none, LossSpecError, "or pass the divisor: loss_weight=", wrong=False)


def case_an_add_loss_that_is_not_a_mean_over_rows() -> None:
    masked = lambda x: ops.sum(ops.relu(x)) / ops.sum(ops.cast(x > 0, x.dtype))  # noqa: E731
    for function, words in (
        (lambda x: 0.1 * ops.sum(x**2), "It is a sum over rows: divide it by the number of rows"),
        (lambda x: ops.sum(x**2, axis=-1), "It is a sum over rows: divide it by the number of rows"),
        (masked, "Add a mean over rows, pass a mean over tokens"),
        (lambda x: ops.mean(ops.var(x, axis=0)), "add_loss is not a mean over the rows of the batch: it is "),
    ):
        refused(Program(lambda function=function: mlp(lambda: Adds(function))), LossSpecError, words)


def case_on_train_on_batch_and_in_several_steps() -> None:
    ours = accumulate(mlp(programs.Centre), microbatch_size=SIZE)
    raises(CoupledSamplesError, "The output of Centre ", lambda: ours.train_on_batch(X, Y))
    if helpers.BACKEND != "torch":
        exact(Program(lambda: mlp(steps_per_execution=2), fit={"batch_size": 5}))


def case_the_loss_is_changed_after_accumulate() -> None:
    model = mlp()
    ours = accumulate(model, microbatch_size=SIZE)
    model.compile(keras.optimizers.SGD(0.3), loss="mae")
    words = "was compiled again after accumulate, but the accumulating model still has the former loss"
    raises(InputError, words, lambda: ours.fit(X, Y, **FIT))
    expected, model = mlp(loss="mae"), mlp()
    ours = accumulate(model, microbatch_size=SIZE)
    ours.compile(keras.optimizers.SGD(0.3), loss="mae")
    expected.fit(X, Y, **FIT)
    ours.fit(X, Y, **FIT)
    got, wanted = (helpers.values(each.trainable_variables) for each in (model, expected))
    helpers.assert_same(got, wanted, bound=helpers.BOUND if helpers.BACKEND != "jax" else 5e-6)
    ours.compile(keras.optimizers.SGD(0.3), loss=programs.contrastive)
    raises(CoupledSamplesError, "The loss 'contrastive' of a row", lambda: ours.fit(X, Y, **FIT))


def case_ragged_batches() -> None:
    if helpers.BACKEND != "tensorflow":  # the others have no ragged tensors
        return
    import tensorflow as tf

    rows = tf.ragged.constant([[1, 2, 3], [1], [2, 2], [3]] * 3, dtype="int64")
    for data in ((rows, Y[:, :1]), (tf.data.Dataset.from_tensor_slices((rows, Y[:, :1])).batch(6),)):
        model = keras.Sequential([layers.Embedding(5, 4), layers.GlobalAveragePooling1D(), layers.Dense(1)])
        model.compile("sgd", "mse")
        ours = accumulate(model, microbatch_size=SIZE)
        words = "The batch has a RaggedTensor"
        raises(SplitError, words, lambda ours=ours, data=data: ours.fit(*data, verbose=0, shuffle=False))


def case_mutant_no_shift_of_the_weights() -> None:
    """A branch with gate 0 has no effect at the initial weights."""
    gate = lambda: coupled("ZeroGate")  # noqa: E731
    rejects(probe, "shifted", lambda mapping: mapping, gate)


def case_mutant_a_bound_that_allows_everything() -> None:
    rejects(comparison, "_bound", lambda model: 10.0, case_a_layer_that_centres_over_the_batch)


def case_mutant_draws_that_differ() -> None:
    """Without fixed draws of `keras.random`, noise looks like coupling or prevents the check."""
    noisy = lambda: refused(  # noqa: E731
        Program(lambda: mlp(programs.Sampled, programs.Centre)), CoupledSamplesError, "Centre ", wrong=False
    )
    noisy()
    rejects(probe, "_CONSTANTS", {}, noisy)
