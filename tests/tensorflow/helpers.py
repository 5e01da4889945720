# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""A small model with an embedding, its losses, and the comparison with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow

tf: Any = tensorflow  # the stubs are incomplete and accept no lists
BOUND = 1e-12
NAMES = ("embedding", "w", "b", "v")
WAYS = ["eager", "graph"]


def one(value: float = 1.0) -> Any:
    return tf.Variable([value], dtype=tf.float64)


def gradient(value: float) -> Any:
    return tf.constant([value], tf.float64)


def sgd(variables: list[Any], rate: float = 1.0, **options: Any) -> Any:
    optimizer = tf.keras.optimizers.SGD(rate, **options)
    optimizer.build(variables)
    return optimizer


def model(dtype: Any = tf.float64) -> list[Any]:
    """Return named variables: an embedding of 7 words and two layers."""
    draw = np.random.default_rng(0).normal
    shapes = ((7, 3), (3, 5), (5,), (5,))
    return [
        tf.Variable(tf.constant(draw(size=shape), dtype), name=name)
        for name, shape in zip(NAMES, shapes, strict=True)
    ]


def texts(lengths: Sequence[int], most: int = 4) -> dict[str, Any]:
    """Return one text per row with the given numbers of tokens; words repeat within a row."""
    draw = np.random.default_rng(1)
    shape = (len(lengths), most)
    return {
        "x": draw.integers(0, 4, shape),
        "y": draw.normal(size=shape),
        "mask": (np.arange(most)[None] < np.array(lengths)[:, None]).astype(np.float64),
    }


def part(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: tf.constant(array[start:stop]) for name, array in batch.items()}


def token_sum(variables: list[Any], batch: dict[str, Any]) -> Any:
    embedding, w, b, v = variables
    hidden = tf.tanh(tf.gather(embedding, batch["x"]) @ w + b)
    return tf.reduce_sum((tf.linalg.matvec(hidden, v) - batch["y"]) ** 2 * batch["mask"])


def count(batch: dict[str, Any]) -> Any:
    return tf.reduce_sum(batch["mask"])


def token_mean(variables: list[Any], batch: dict[str, Any]) -> Any:
    """Mean over tokens; without tokens 0 / 0 = NaN."""
    return token_sum(variables, batch) / count(batch)


def gradients(
    variables: list[Any], batch: dict[str, Any], loss_of: Any = token_mean
) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        loss = loss_of(variables, batch)
    return loss, tape.gradient(loss, variables)


def assert_same(
    got: Sequence[Any], expected: Sequence[Any], start: Sequence[Any] | None = None, *, least: float = 1e-6
) -> None:
    """Compare each variable relative to its largest element; with `start`, assert that it moved."""
    offenders = []
    assert len(got) == len(expected)
    for index, (left, right) in enumerate(zip(got, expected, strict=True)):
        ours, theirs = np.asarray(left), np.asarray(tf.convert_to_tensor(right))
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        moved = theirs if start is None else theirs - np.asarray(start[index])
        assert np.abs(moved).max() > least, f"the premise: variable {index} is not zero, or moved"
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        if not error <= BOUND:  # true for NaN too
            offenders.append(f"{index}: {error:.2e}")
    assert not offenders, offenders
