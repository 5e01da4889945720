# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Behaviour of an accumulating model: callbacks, saving, memory, FlushTail."""

from __future__ import annotations

import gc
import pathlib
import tempfile
import weakref
from typing import Any

import keras
import numpy as np

from superbatch.keras import FlushTail, accumulate
from tests.keras import helpers
from tests.keras.helpers import (
    X,
    Y,
    array,
    assert_same,
    compare,
    dense,
    values,
)

SGD = keras.optimizers.SGD


def case_one_batch_is_one_update() -> None:
    seen: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = dense(compiled={"metrics": ["mae"]})
    ours = accumulate(model, microbatch_size=2)
    ours.fit(X, Y, batch_size=8, steps_per_epoch=2, verbose=0, callbacks=[count])
    assert seen == [0, 1] and int(model.optimizer.iterations) == 2
    logs = ours.train_on_batch(X, Y, return_dict=True)
    assert set(logs) == {"loss", "mae"} and int(model.optimizer.iterations) == 3
    assert set(ours.evaluate(X, Y, return_dict=True, verbose=0)) == {"loss", "mae"}
    assert np.array_equal(ours.predict(X, verbose=0), model.predict(X, verbose=0))


def case_the_users_model_is_not_changed() -> None:
    model = dense()
    before = dict(vars(model))
    ours = accumulate(model, microbatch_size=4)
    assert isinstance(ours, type(model)) and ours is not model
    assert ours.layers == model.layers and ours.get_layer("out") is model.get_layer("out")
    assert ours.optimizer is model.optimizer and ours.inputs == model.inputs
    ours.fit(X, Y, batch_size=21, verbose=0)
    changed = {name for name, value in vars(model).items() if value is not before.get(name)}
    assert changed <= {"_called", "_default_save_signature"}, changed
    assert type(model).train_step is keras.Model.train_step and model.train_function is None
    model.fit(X, Y, batch_size=21, verbose=0)  # it still trains
    assert int(model.optimizer.iterations) == 2
    again = accumulate(ours, microbatch_size=7)
    again.fit(X, Y, batch_size=21, verbose=0)
    assert int(model.optimizer.iterations) == 3
    again.compile(SGD(0.1), loss="mae")
    again.fit(X, Y, batch_size=21, verbose=0)
    assert int(model.optimizer.iterations) == 3 and int(again.optimizer.iterations) == 1


def case_a_saved_model_is_a_plain_model() -> None:
    model = dense(keras.optimizers.Adam(0.1))
    ours = accumulate(model, microbatch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        best = keras.callbacks.ModelCheckpoint(path / "best.keras")
        ours.fit(X, Y, batch_size=21, verbose=0, callbacks=[best])
        ours.save(path / "ours.keras")
        keras.saving.save_model(ours, path / "function.keras")
        ours.save_weights(path / "ours.weights.h5")
        for name in ("best", "ours", "function"):
            loaded = keras.saving.load_model(path / f"{name}.keras")
            assert type(loaded) is type(model) and loaded.train_function is None
            assert type(loaded).train_step is keras.Model.train_step
            assert_same(values(loaded.weights), values(model.weights), bound=0.0)
            assert_same(values(loaded.optimizer.variables), values(model.optimizer.variables), bound=0.0)
        other = dense(keras.optimizers.Adam(0.1), seed=5)
        other.optimizer.build(other.trainable_variables)
        other.load_weights(path / "ours.weights.h5")
        assert_same(values(other.weights), values(model.weights), bound=0.0)


def case_a_model_from_its_config_is_a_plain_model() -> None:
    for model in (dense(), keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])):
        model.compile(SGD(0.1), loss="mse")
        ours = accumulate(model, microbatch_size=4)
        for other in (keras.models.clone_model(ours), type(ours).from_config(ours.get_config())):
            assert type(other) is type(model)
            other.compile(SGD(0.1), loss="mse")
            other.train_on_batch(X, Y)


def case_no_second_copy_of_the_batch() -> None:
    """A compiled update on JAX needs the memory of the batch and of one micro-batch."""
    if helpers.BACKEND != "jax":  # TensorFlow and torch slice each micro-batch when it is needed
        return
    import jax

    for rows in (64, 60):  # micro-batches of one size, and of two sizes
        x = np.zeros((rows, 4096))
        model = keras.Sequential([keras.Input((4096,)), keras.layers.Dense(1)])
        model.compile(SGD(0.1), loss="mse")
        model.optimizer.build(model.trainable_variables)
        ours = accumulate(model, microbatch_size=8)
        ours._symbolic_build(data_batch=(x[:2], x[:2, :1]))
        kinds = ("trainable", "non_trainable", "optimizer", "metrics")
        state = ours._get_jax_state(**{f"{kind}_variables": True for kind in kinds})
        compiled = jax.jit(ours.train_step).lower(state, (x, x[:, :1])).compile()
        assert compiled.memory_analysis().argument_size_in_bytes > x.nbytes, (
            "the premise: its arguments include the batch"
        )
        assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes / 2


def case_rows_of_a_distributed_batch() -> None:
    """Micro-batches are slices: a gather by row indices would copy all rows to every device."""
    if helpers.BACKEND != "jax":
        return
    devices = keras.distribution.list_devices()[:1]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    try:
        compare(dense, microbatch_size=5)
    finally:
        keras.distribution.set_distribution(None)


def patch_to_record(owner: Any, name: str, which: Any, seen: list[Any]) -> Any:
    """Patch a function to record weak references to `which` of each call; return a function to undo it."""
    right = getattr(owner, name)

    def recording(*arguments: Any) -> Any:
        result = right(*arguments)
        seen.append(weakref.ref(which(result, *arguments)))
        return result

    setattr(owner, name, recording)
    return lambda: setattr(owner, name, right)


def case_batches_and_predictions_are_freed() -> None:
    """Both are freed before Keras loads the next batch, even without Python's garbage collector."""
    if helpers.BACKEND != "torch":  # the others compile, and keep neither
        return
    from superbatch.keras import forward, step_torch

    predictions: list[Any] = []
    batches: list[Any] = []
    most: list[int] = []
    undo = [
        patch_to_record(forward, "predictions", lambda result, *_: result, predictions),
        patch_to_record(step_torch, "train_step", lambda _, *given: given[-1][0], batches),
    ]

    def alive(refs: list[Any]) -> int:
        return sum(ref() is not None for ref in refs)

    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: most.append(alive(batches) + alive(predictions))
    )
    loss = Counting(lambda: alive(predictions))
    gc.disable()
    try:
        ours = accumulate(dense(loss=loss), microbatch_size=2)
        ours.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[watch])
    finally:
        gc.enable()
        for each in undo:
            each()
    assert len(batches) == 9 and len(predictions) > 30, "the premise: both were recorded"
    assert not any(most), most
    trained = loss.seen[-3 * (4 + 4 + 3) :]  # the check of the first batch keeps a few rows
    assert max(trained) == 1, loss.seen


class Counting(keras.losses.MeanSquaredError):
    """Loss that calls `count` and records its result in each call."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.count, self.seen = count, []

    def call(self, y_true: Any, y_pred: Any) -> Any:
        self.seen.append(self.count())
        return super().call(y_true, y_pred)


def case_mutants_that_keep_batches_and_predictions() -> None:
    if helpers.BACKEND != "torch":
        return
    from superbatch.keras import step_torch
    from tests.keras.cases_mutants import rejects

    rejects(step_torch, "free_cycles", lambda generation: None, case_batches_and_predictions_are_freed)
    rejects(step_torch, "train_function", lambda step: step, case_batches_and_predictions_are_freed)


def case_flush_tail() -> None:
    def fit(rows: Any, **options: Any) -> Any:
        steps = options.pop("steps", None)
        adam = keras.optimizers.Adam(0.05, clipnorm=0.5, gradient_accumulation_steps=steps)
        model = dense(adam)
        model.fit(X[rows], Y[rows], shuffle=False, verbose=0, **options)
        return model

    # Micro-batches of 2 rows in windows of 4: 8, 8 and 4 rows.
    whole = dense(keras.optimizers.Adam(0.05, clipnorm=0.5))
    for _ in range(2):
        for rows in (slice(0, 8), slice(8, 16), slice(16, 20)):
            whole.train_on_batch(X[rows], Y[rows])
    options = {"batch_size": 2, "epochs": 2, "validation_data": (X[:2], Y[:2])}
    flushed = fit(slice(0, 20), steps=4, callbacks=[FlushTail()], **options)
    left = fit(slice(0, 20), steps=4, **options)
    assert int(flushed.optimizer.iterations) == 6
    assert_same(values(flushed.trainable_variables), values(whole.trainable_variables), bound=helpers.BOUND)
    errors = [
        np.abs(array(a) - array(b)).max()
        for a, b in zip(left.trainable_variables, whole.trainable_variables, strict=True)
    ]
    assert max(errors) > 1e-3, "the premise: without it, rows are left out"
    want = "Give the optimizer gradient_accumulation_steps="
    plain = dense()
    helpers.raises(helpers.OptimizerError, want, lambda: plain.fit(X, Y, callbacks=[FlushTail()], verbose=0))


def case_flush_tail_validates_after_its_update() -> None:
    model = dense(SGD(0.3, gradient_accumulation_steps=4))
    history = model.fit(
        X[:6], Y[:6], batch_size=1, validation_data=(X, Y), shuffle=False, verbose=0, callbacks=[FlushTail()]
    )
    got = model.evaluate(X, Y, verbose=0)
    assert abs(history.history["val_loss"][0] - got) < 1e-6
