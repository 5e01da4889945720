# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""`Accumulator.check_loss` passes losses and weights with an exact update, and raises for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
from superbatch.errors import CoupledSamplesError, InputError, LossSpecError
from superbatch.tensorflow import Accumulator, checking
from tests.tensorflow.helpers import count, gradients, model, part, texts, tf, token_mean, token_sum

pytestmark = pytest.mark.tensorflow
LENGTHS = [4, 1, 3, 2, 2, 3, 1, 4, 2, 1, 3, 2]
SIZES = [5, 4, 3]


def rows(batch: Any) -> Any:
    return len(batch["x"])


def row_mean(variables: list[Any], batch: Any) -> Any:
    return token_sum(variables, batch) / rows(batch)


def predictions(variables: list[Any], batch: Any) -> Any:
    embedding, w, b, v = variables
    return tf.linalg.matvec(tf.tanh(tf.gather(embedding, batch["x"]) @ w + b), v)


def centred(variables: list[Any], batch: Any) -> Any:
    found = predictions(variables, batch)
    return tf.reduce_mean((found - tf.reduce_mean(found, axis=0) - batch["y"]) ** 2)


def contrastive(variables: list[Any], batch: Any) -> Any:
    found = predictions(variables, batch)
    scores = tf.matmul(found, found, transpose_b=True)
    return tf.reduce_mean(tf.reduce_logsumexp(scores, axis=-1) - tf.linalg.diag_part(scores))


def gated(variables: list[Any], batch: Any) -> Any:
    """A coupled branch that is 0 in the loss but not in the gradient."""
    zero = tf.reduce_sum(variables[2]) - tf.stop_gradient(tf.reduce_sum(variables[2]))
    return row_mean(variables, batch) + 10 * zero * centred(variables, batch)


def difference(loss: Any, weight: Any, reduction: Any) -> float:
    """Return the difference between the gradient from micro-batches and that of the batch."""
    variables, batch = model(), texts(LENGTHS)
    accumulator, start = Accumulator(variables, reduction=reduction), 0
    for size in SIZES:
        some = part(batch, start, start + size)
        accumulator.add(gradients(variables, some, loss)[1], weight(some))
        start += size
    whole = gradients(variables, part(batch, 0, start), loss)[1]
    divisor = float(weight(batch)) if reduction == "sum" else 1.0
    pairs = zip(accumulator.mean(), whole, strict=True)
    apart = [np.abs(a - tf.convert_to_tensor(b) / divisor).max() for a, b in pairs]
    return max(apart) / max(np.abs(tf.convert_to_tensor(b)).max() / divisor for b in whole)


@pytest.mark.parametrize(
    ("loss", "weight", "reduction"),
    [
        (token_mean, count, "mean"),
        (row_mean, rows, "mean"),
        (token_sum, count, "sum"),
        (token_sum, rows, "sum"),
    ],
)
def test_right_losses_pass(loss: Any, weight: Any, reduction: Any) -> None:
    variables = model()
    Accumulator(variables, reduction=reduction).check_loss(
        lambda batch: loss(variables, batch), texts(LENGTHS), weight=weight
    )
    assert difference(loss, weight, reduction) < 1e-12
    for before, after in zip(model(), variables, strict=True):
        np.testing.assert_array_equal(before.numpy(), after.numpy())


WRONG = [
    (token_mean, rows, "mean", LossSpecError, r"not a mean over rows: .* weight=tf\.reduce_sum\(mask\)"),
    (
        token_mean,
        lambda batch: 1,
        "mean",
        LossSpecError,
        "The weight is 1 for 8 rows at once and 2 for two parts",
    ),
    (row_mean, count, "mean", LossSpecError, r"a mean over rows, .*pass weight=len\(rows\)"),
    (token_sum, rows, "mean", LossSpecError, r'The loss is a sum, .* Make it with reduction="sum"'),
    (row_mean, rows, "sum", LossSpecError, 'a mean over rows, .* Make it with reduction="mean"'),
    (centred, rows, "mean", LossSpecError, r"couples the rows \(contrastive losses"),
    (contrastive, rows, "mean", LossSpecError, r"couples the rows \(contrastive losses"),
    (gated, rows, "mean", LossSpecError, r"couples the rows \(contrastive losses"),
    (centred, count, "mean", CoupledSamplesError, "Pass the divisor of the loss as weight"),
]


@pytest.mark.parametrize(("loss", "weight", "reduction", "kind", "words"), WRONG)
def test_wrong_losses_raise(
    loss: Any, weight: Any, reduction: Any, kind: type[Exception], words: str
) -> None:
    variables = model()
    accumulator = Accumulator(variables, reduction=reduction)
    with pytest.raises(kind, match=words):
        accumulator.check_loss(lambda batch: loss(variables, batch), texts(LENGTHS), weight=weight)
    if not words.startswith("The weight is 1"):  # a mean of means, wrong only for unequal counts
        assert difference(loss, weight, reduction) > 1e-3, "the premise: the update would be wrong"


def test_losses_that_cannot_be_compared() -> None:
    variables = model()
    accumulator, batch = Accumulator(variables), texts(LENGTHS)
    with pytest.raises(InputError, match="it draws random numbers"):
        accumulator.check_loss(
            lambda batch: row_mean(variables, batch) * tf.random.uniform([], dtype=tf.float64),
            batch,
            weight=rows,
        )
    with pytest.raises(InputError, match="with 1 rows cannot split them"):
        accumulator.check_loss(lambda batch: row_mean(variables, batch), part(batch, 0, 1), weight=rows)
    with pytest.raises(InputError, match="Call it once outside"):
        tf.function(lambda: accumulator.check_loss(lambda batch: 0.0, batch, weight=rows))()


def test_a_micro_batch_without_tokens() -> None:
    variables, empty = model(), texts([4, 1, 3, 2, 2, 0, 0, 0])
    Accumulator(variables).check_loss(lambda batch: token_mean(variables, batch), empty, weight=count)


def test_mutant_that_compares_only_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients the gated branch is not detected."""
    right = checking._same
    monkeypatch.setattr(checking, "_same", lambda a, b, bound: right(a[:1], b[:1], bound))
    variables = model()
    loss = lambda batch: gated(variables, batch)  # noqa: E731
    Accumulator(variables).check_loss(loss, texts(LENGTHS), weight=rows)
