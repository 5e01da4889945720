# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Errors and their texts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from superbatch.errors import CoupledSamplesError, InputError, LossSpecError, OptimizerError, SplitError
from superbatch.keras import accumulate, first_check
from tests.keras.cases_exact import Halving, count_known
from tests.keras.helpers import LABELS, TOKENS, X, Y, array, compare, cross_entropy, dense, raises, text


def fit(model: Any, x: Any = X, y: Any = Y, *, options: Any = None, **arguments: Any) -> Any:
    ours = accumulate(model, microbatch_size=4, **(options or {}))
    return lambda: ours.fit(x, y, batch_size=21, verbose=0, **arguments)


def case_options() -> None:
    model = dense()
    raises(InputError, "is below 1", lambda: accumulate(model, microbatch_size=0))
    wrong: Any = "rows"
    raises(
        InputError,
        "Pass a function (x, y, sample_weight)",
        lambda: accumulate(model, microbatch_size=2, loss_weight=wrong),
    )
    raises(
        InputError,
        "Pass one of ('error', 'per_microbatch')",
        lambda: accumulate(model, microbatch_size=2, batchnorm=wrong),
    )
    raises(
        InputError, "check='rows' is not a bool", lambda: accumulate(model, microbatch_size=2, check=wrong)
    )


def case_models() -> None:
    raises(InputError, "Pass a keras.Model", lambda: accumulate(keras.layers.Dense(1), microbatch_size=2))
    bare = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    raises(InputError, "Call model.compile(...) first", lambda: accumulate(bare, microbatch_size=2))

    class Own(keras.Model):
        def train_step(self, *arguments: Any) -> Any:
            return {}

    own = Own()
    own.compile("sgd", "mse")
    of_one = dense()
    of_one.train_step = lambda *arguments: {}
    for each in (own, of_one):
        words = "overrides train_step, which accumulate would replace. Override compute_loss instead"
        raises(InputError, words, lambda each=each: accumulate(each, microbatch_size=2))
        loop = {"tensorflow": "superbatch.tensorflow.Accumulator", "jax": "superbatch.jax.value_and_grad"}
        words = f"with {loop.get(keras.backend.backend(), 'superbatch.torch.Accumulator')}."
        raises(InputError, words, lambda each=each: accumulate(each, microbatch_size=2))
    twice = dense(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    raises(
        OptimizerError, "Leave gradient_accumulation_steps out", lambda: accumulate(twice, microbatch_size=2)
    )


def case_losses_without_a_known_divisor() -> None:
    raises(LossSpecError, "or pass the divisor: loss_weight=", fit(dense(loss=Halving())))
    weights = np.ones(21)
    stated = {"loss_weight": count_known}
    one = fit(dense(loss=Halving()), options=stated, sample_weight=weights)
    raises(LossSpecError, "Keras multiplies it by each sample weight or mask", one)
    each = dense(loss=keras.losses.MeanSquaredError(reduction="none"))
    raises(LossSpecError, 'Give the loss reduction="sum_over_batch_size"', fit(each))
    raises(LossSpecError, "Leave loss_weight out", fit(dense(), options=stated))
    vector = {"loss_weight": lambda x, y, sample_weight: ops.ones((2,))}
    raises(InputError, "Return a scalar", fit(dense(loss=Halving()), options=vector))


def case_losses_over_the_batch() -> None:
    """A loss with one number per class, from all rows, cannot come from micro-batches."""
    of_classes = lambda y_true, y_pred: ops.sum((y_true - y_pred) ** 2, axis=0)  # noqa: E731
    for check in (True, False):
        classes = fit(dense(loss=of_classes), options={"check": check})
        raises(LossSpecError, "each number depends on all rows of a micro-batch", classes)


def case_layers_with_state_from_the_previous_forward() -> None:
    normed = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    stateful = keras.layers.Bidirectional(keras.layers.SimpleRNN(2, stateful=True))
    for shape, layer, words in (
        ((3,), normed, "the next micro-batch would use other weights"),
        ((5, 3), stateful, "Pass stateful=False to the layer"),
    ):
        model = keras.Sequential([keras.Input(batch_shape=(6, *shape)), layer])
        model.compile("sgd", "mse")
        raises(InputError, words, lambda model=model: accumulate(model, microbatch_size=1))


def renormed(*, renorm: bool = True, trainable: bool = True) -> Any:
    keras.utils.set_random_seed(1)
    norm = keras.layers.BatchNormalization(renorm=renorm, name="norm", trainable=trainable)
    model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def masked(*, mask_zero: bool = True, pooled: bool = False) -> Any:
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(20, 4, mask_zero=mask_zero)(inputs)
    if pooled:  # the mask ends at the pooling
        hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    if not pooled:
        hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def case_batchnorm_with_mask() -> None:
    raises(
        InputError,
        "BatchNormalization with a mask (norm), whose moving statistics would count rows",
        lambda: accumulate(masked(), microbatch_size=4, batchnorm="per_microbatch"),
    )
    # Without the error the result would be wrong: the mean of two halves is not the mean over tokens.
    ids = np.array([[3, 0, 0, 0, 0, 0], [7, 2, 9, 4, 1, 5]])
    means = []
    for rows in (ids, ids[:1], ids[1:]):
        model = masked()
        model(rows, training=True)
        means.append(array(model.get_layer("norm").moving_mean))
    assert np.abs((means[1] + means[2]) / 2 - means[0]).max() > 0.1 * np.abs(means[0]).max(), "the premise"
    for options in ({"mask_zero": False}, {"pooled": True}):
        accumulate(masked(**options), microbatch_size=4, batchnorm="per_microbatch")


def case_batchnorm_with_renorm() -> None:
    for options in ({}, {"batchnorm": "per_microbatch"}):
        raises(
            InputError,
            "BatchNormalization with renorm=True (norm), which updates its averages in every forward",
            lambda options=options: accumulate(renormed(), microbatch_size=4, **options),
        )
    # Without the error the result would be wrong: two halves of a batch are two steps of the averages.
    whole, halves = renormed(), renormed()
    whole(X[:20], training=True)
    halves(X[:10], training=True)
    halves(X[10:20], training=True)
    steps = [np.abs(array(model.layers[0].renorm_mean)) for model in (whole, halves)]
    assert np.abs(steps[0] - steps[1]).max() > 0.1 * steps[0].max(), "the premise: the averages differ"
    # The remedies in the error.
    accumulate(renormed(renorm=False), microbatch_size=4, batchnorm="per_microbatch")
    compare(lambda: renormed(trainable=False))


def case_a_negative_weight_gives_nan() -> None:
    negative = {"loss_weight": lambda x, y, sample_weight: ops.convert_to_tensor(-1.0)}
    model = dense(loss=Halving())
    fit(model, options=negative)()
    assert np.isnan(keras.ops.convert_to_numpy(model.weights[0])).any()


def case_skip_microbatch_needs_one_term() -> None:
    skip = {"nonfinite": "skip_microbatch"}
    model = text(cross_entropy())
    model.layers[-1].activity_regularizer = keras.regularizers.L2(0.1)
    raises(
        InputError,
        "does not work with this loss",
        fit(model, TOKENS, LABELS, options=skip),
    )


def case_arrays_that_do_not_split() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    from superbatch.keras import splitting

    raises(SplitError, "Give all arrays the same number of rows", lambda: splitting.leaves((X, Y[:4])))
    raises(SplitError, "Give it one entry for each row", lambda: splitting.leaves((X, np.float64(3))))
    raises(SplitError, "there is nothing to split", lambda: splitting.leaves((None, None)))


def case_more_targets_than_rows() -> None:
    """TensorFlow knows the lengths only when the step runs; the check reads the first batch before."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    data = tf.data.Dataset.from_generator(
        lambda: iter([(X[:5], Y[:9])]),
        output_signature=(tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None, 2), tf.float64)),
    )
    wrong = "Give all arrays the same number of rows"
    for kind, check in ((SplitError, True), (tf.errors.InvalidArgumentError, False)):
        ours = accumulate(dense(), microbatch_size=2, check=check)
        raises(kind, wrong, lambda ours=ours: ours.fit(data, shuffle=False, verbose=0))


def case_the_check_restores_the_state_of_torch() -> None:
    """Keras' scopes do not cover torch's generator and the buffers of its modules."""
    if keras.backend.backend() != "torch":
        return
    import torch

    def wrapped(*modules: Any) -> tuple[Any, Any]:
        module = torch.nn.Sequential(torch.nn.Linear(3, 3, dtype=torch.float64), *modules)
        wrapper = keras.layers.TorchModuleWrapper(module)
        model = keras.Sequential([wrapper, keras.layers.Dense(2)])
        model(X[:2], training=False)
        model.compile("sgd", "mse")
        return model, module

    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    raises(CoupledSamplesError, "The output of TorchModuleWrapper ", fit(wrapped(norm)[0]))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    results = []
    for check in (True, False):
        keras.utils.set_random_seed(1)
        model, module = wrapped(torch.nn.Dropout(0.5))
        fit(model, options={"check": check}, shuffle=False, epochs=1)()
        results.append(module[0].weight.detach().clone())
    assert torch.equal(*results), "the same draws of dropout with and without the check"


LABELLED = np.zeros((23, 1))
LABELLED[[0, 6, 14, 3, 9, 10, 11, 20, 21]] = 1.0  # half of the rows 0, 1, 6 and 7, and half of 14 and 15
INPUTS = np.random.default_rng(6).normal(size=(23, 3))


def balanced(y_true: Any, y_pred: Any) -> Any:
    """Loss per row, weighted by the share of its class in the batch."""
    share = ops.mean(y_true)
    weight = ops.where(y_true > 0.5, 1 / (share + 0.1), 1 / (1.1 - share))
    return ops.mean(weight * (y_true - y_pred) ** 2, axis=-1)


def labelled_mean(y_true: Any, y_pred: Any) -> Any:
    """Mean over the rows of one class."""
    return ops.sum(y_true * (y_true - y_pred) ** 2) / ops.sum(y_true)


def one_output(loss: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.3), loss=loss)
    return model


def case_micro_batches_that_agree_by_chance() -> None:
    """Each comparison uses other rows, because six fixed rows may have equal class shares by chance."""
    by_rows = {"loss_weight": lambda x, y, sample_weight: ops.shape(y)[0]}
    programs: Any = (
        (balanced, {}, CoupledSamplesError, "The loss 'balanced' of a row depends on the other rows"),
        (labelled_mean, by_rows, LossSpecError, "The loss 'labelled_mean' is not divided by loss_weight"),
    )
    spread = first_check._spread
    for loss, options, kind, words in programs:
        fit = {"batch_size": 23, "verbose": 0, "shuffle": False}
        ours = accumulate(one_output(loss), microbatch_size=4, **options)
        raises(kind, words, lambda ours=ours, fit=fit: ours.fit(INPUTS, LABELLED, **fit))
        if keras.backend.backend() != "jax":  # micro-batches of JAX are every k-th row
            first_check._spread = lambda rows, size, step, turn: spread(rows, size, step, 0)
            try:  # the mutant: every comparison uses the same rows
                ours = accumulate(one_output(loss), microbatch_size=4, **options)
                ours.fit(INPUTS, LABELLED, **fit)
            finally:
                first_check._spread = spread
            assert int(ours.optimizer.iterations) == 1


def case_layers_that_mix_rows() -> None:
    images = np.random.default_rng(1).uniform(size=(12, 4, 4, 3))
    for layer in (keras.layers.MixUp, keras.layers.CutMix):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((4, 4, 3)), layer(), keras.layers.Flatten(), keras.layers.Dense(2)]
        )
        model.compile("sgd", "mse")
        words = "apply it to whole batches in the data pipeline, as in dataset.batch(n).map(layer)"
        ours = accumulate(model, microbatch_size=4)
        raises(
            CoupledSamplesError, words, lambda ours=ours: ours.fit(images, np.zeros((12, 2)), batch_size=12)
        )


class Neighbour(keras.layers.Layer):
    """Sum of a row and of the row with the given index."""

    def call(self, x: Any, number: Any) -> Any:
        return x + ops.take(x, ops.cast(number[:, 0], "int32"), axis=0)


def case_rows_that_are_read_by_index() -> None:
    """A micro-batch lacks these rows: JAX reads NaN, the other backends raise."""
    inputs, numbers = keras.Input((3,)), keras.Input((1,))
    model = keras.Model([inputs, numbers], keras.layers.Dense(1)(Neighbour()(inputs, numbers)))
    model.compile("sgd", "mse")
    x = [INPUTS, np.full((23, 1), 22.0)]
    jax = keras.backend.backend() == "jax"
    words = "The model predicts NaN for" if jax else "reads rows of the batch by index"
    ours = accumulate(model, microbatch_size=4)
    raises(InputError, words, lambda: ours.fit(x, LABELLED, batch_size=23, verbose=0))
    assert int(ours.optimizer.iterations) == 0


class Adjacent(keras.layers.Layer):
    """Sum over the neighbours of each row in a graph."""

    def call(self, x: Any, matrix: Any) -> Any:
        return ops.matmul(matrix, x)

    def compute_output_spec(self, x: Any, matrix: Any) -> Any:
        return keras.KerasTensor((None, x.shape[-1]), x.dtype)


def case_an_error_of_the_framework_gets_a_note() -> None:
    inputs, matrix = keras.Input((3,)), keras.Input((23,))
    model = keras.Model([inputs, matrix], keras.layers.Dense(1)(Adjacent()(inputs, matrix)))
    model.compile("sgd", "mse")
    found: Any = None
    try:
        accumulate(model, microbatch_size=4).fit([INPUTS, np.eye(23)], LABELLED, batch_size=23, verbose=0)
    except Exception as error:  # noqa: BLE001  (of the framework)
        found = error
    assert found is not None
    notes = getattr(found, "__notes__", [])
    assert any("at most 4 rows of the batch. If they need all rows" in each for each in notes), notes


def case_predictions_without_a_last_axis() -> None:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    for loss in ("mse", "mae", "binary_crossentropy"):
        model = keras.Model(inputs, ops.squeeze(keras.layers.Dense(1, "sigmoid")(inputs), axis=-1))
        model.compile("sgd", loss)
        words = "Keep the last axis: end the model with Dense(1) and no squeeze"
        raises(LossSpecError, words, fit(model, INPUTS, LABELLED[:, 0]))
    model.compile("sgd", lambda y_true, y_pred: ops.mean((y_true - y_pred) ** 2))
    raises(LossSpecError, "or pass the divisor", fit(model, INPUTS, LABELLED[:, 0]))
