# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""What must hold, as functions: the tests call them, and the mutants must make them fail."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from superbatch.tensorflow import Accumulator
from tests.tensorflow.helpers import (
    assert_same,
    count,
    gradients,
    model,
    part,
    texts,
    token_mean,
    token_sum,
)

LENGTHS = [4, 1, 0, 0, 2, 3, 1, 4, 2, 1, 3, 2, 4, 1, 1]
WINDOWS = [[2, 2, 4], [3, 2], [2]]  # unequal micro-batches, the second one empty; a tail of one micro-batch


def adam() -> Any:
    schedule: Any = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.05])
    return keras.optimizers.Adam(schedule, epsilon=1e-3)


def signature() -> Any:
    return {
        "x": tf.TensorSpec([None, 4], tf.int64),
        "y": tf.TensorSpec([None, 4], tf.float64),
        "mask": tf.TensorSpec([None, 4], tf.float64),
    }


def train(
    accumulator: Any, variables: list[Any], optimizer: Any, *, way: str, loss_of: Any = token_mean
) -> Any:
    """Windows over texts, eager or in two graphs; what each window says."""
    batch, outcomes, start = texts(LENGTHS), [], 0

    def add_one(microbatch: Any) -> None:
        loss, found = gradients(variables, microbatch, loss_of)
        accumulator.add(found, count(microbatch), loss=loss)

    def update() -> Any:
        return accumulator.apply(optimizer)

    add: Any = add_one
    apply: Any = update
    if way == "graph":
        optimizer.build(variables)  # else the first call is traced twice, as with any optimizer of Keras
        add, apply = tf.function(add, input_signature=[signature()]), tf.function(apply)
    for window in WINDOWS:
        for size in window:
            add(part(batch, start, start + size))
            start += size
        outcomes.append(apply())
    assert start == len(LENGTHS)
    if way == "graph":
        traces = [function.experimental_get_tracing_count() for function in (add, apply)]
        assert traces == [1, 1], traces
    return outcomes


def large_batch(
    variables: list[Any], optimizer: Any, clip: float | None = None
) -> tuple[list[float], list[float]]:
    """The same windows in one piece each; losses and norms."""
    batch, start, losses, norms = texts(LENGTHS), 0, [], []
    for window in WINDOWS:
        whole = part(batch, start, start + sum(window))
        start += sum(window)
        loss, found = gradients(variables, whole)
        assert isinstance(found[0], tf.IndexedSlices), "the premise: an embedding has a sparse gradient"
        assert len(set(found[0].indices.numpy())) < len(found[0].indices), "the premise: words repeat"
        found[0] = tf.convert_to_tensor(found[0])
        norms.append(float(tf.linalg.global_norm(found)))
        if clip:
            assert norms[-1] > clip, "the premise: every update is clipped"
            found, _ = tf.clip_by_global_norm(found, clip)
        optimizer.apply(found, variables)
        losses.append(float(loss))
    return losses, norms


def windows(way: str = "eager", clip: float | None = None, reduction: Any = "mean") -> None:
    """Token weights, unequal micro-batches, an empty one, a tail: as the large batch, in every variable."""
    start, plain, ours = model(), model(), model()
    optimizer, theirs = adam(), adam()
    loss, found = gradients(ours, part(texts(LENGTHS), 2, 4))
    assert np.isnan(float(loss)) and np.isnan(found[1].numpy()).any(), "the premise: an empty one is 0 / 0"
    losses, norms = large_batch(plain, theirs, clip)
    accumulator = Accumulator(ours, max_grad_norm=clip, reduction=reduction)
    loss_of = token_sum if reduction == "sum" else token_mean
    outcomes = train(accumulator, ours, optimizer, way=way, loss_of=loss_of)
    assert_same(ours, plain, start)
    state = [[v for v in one.variables if v.shape] for one in (optimizer, theirs)]
    assert_same(*state, least=1e-9)
    assert optimizer.iterations == 3
    np.testing.assert_allclose([float(one.loss) for one in outcomes], losses, rtol=1e-12)
    np.testing.assert_allclose([float(one.grad_norm) for one in outcomes], norms, rtol=1e-12)
    assert [int(one.weight) for one in outcomes] == [sum(LENGTHS[:8]), sum(LENGTHS[8:13]), sum(LENGTHS[13:])]
    assert [int(one.microbatches) for one in outcomes] == [3, 2, 1]
