# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""A small model with an embedding, its losses, and the comparison with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow

tf: Any = tensorflow  # the stubs know a part of it, and take no lists
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
    """Named variables: an embedding of 7 words, then two layers."""
    draw = np.random.default_rng(0).normal
    shapes = ((7, 3), (3, 5), (5,), (5,))
    return [
        tf.Variable(tf.constant(draw(size=shape), dtype), name=name)
        for name, shape in zip(NAMES, shapes, strict=True)
    ]


def texts(lengths: Sequence[int], most: int = 4) -> dict[str, Any]:
    """One text per row, of so many tokens; words repeat within every row."""
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
    """The mean over tokens: 0 / 0 where there is none."""
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
    """Each variable by name, relative to the largest element; it moved from `start`, if that is given."""
    offenders = []
    assert len(got) == len(expected)
    for index, (left, right) in enumerate(zip(got, expected, strict=True)):
        ours, theirs = np.asarray(left), np.asarray(tf.convert_to_tensor(right))
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        moved = theirs if start is None else theirs - np.asarray(start[index])
        assert np.abs(moved).max() > least, f"the premise: variable {index} is not zero, or moved"
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        if not error <= BOUND:  # NaN is an offender, too
            offenders.append(f"{index}: {error:.2e}")
    assert not offenders, offenders
