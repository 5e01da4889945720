# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Wrong accumulation: a check of the other tests must reject each mutant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
from superbatch import normalize
from superbatch.tensorflow import adding, arithmetic, boundary
from tests.tensorflow import checks, test_edges
from tests.tensorflow.helpers import tf

pytestmark = pytest.mark.tensorflow


def by_microbatches(totals: Any, weight: Any) -> list[Any]:
    return [total / 3 for total in totals]


def everything_present(totals: Any, patterns: Any, count: int) -> list[Any]:
    return [frozenset(range(count))]


def not_cleared(found: Any, strategy: Any) -> list[Any]:
    return []


def multiplied(found: Any, strategy: Any) -> list[Any]:
    for variable in [*found.sums, found.counts]:
        variable.assign(0 * variable)
    return []


def each_clipped(gradients: Any, norm: Any, finite: Any, scale: Any, options: Any) -> Any:
    return {i: tf.clip_by_norm(gradient, options.max_grad_norm) for i, gradient in gradients.items()}


MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "a mean of means": (normalize, "after_forward_scale", lambda weight, reduction: 1, checks.windows),
    "divided by 3": (arithmetic, "per_weight", by_microbatches, checks.windows),
    "each variable clipped separately": (
        boundary,
        "_clipped",
        each_clipped,
        partial(checks.windows, clip=0.01),
    ),
    "the last of repeated rows": (
        tf.raw_ops,
        "ResourceScatterAdd",
        lambda resource, indices, updates: tf.raw_ops.ResourceScatterUpdate(
            resource=resource, indices=indices, updates=updates
        ),
        checks.windows,
    ),
    "the window is not reset": (boundary, "clear", not_cleared, checks.windows),
    "zeros for variables without gradient": (
        boundary,
        "_possible",
        everything_present,
        checks.missing_gradients,
    ),
    "sums in bfloat16": (arithmetic, "sum_dtype", lambda dtype, choice=None: dtype, checks.low_precision),
    "non-finite micro-batches count": (
        arithmetic,
        "all_finite",
        lambda values: tf.constant(value=True),
        checks.bad_microbatch_left_out,
    ),
    "noise of slices of repeated rows": (adding, "_joined", lambda gradient, part: part, checks.noise),
    "noise without weights": (arithmetic, "square_sum", lambda value: tf.ones((), tf.float64), checks.noise),
    "0 x NaN": (tf, "where", lambda keep, yes, no: yes, checks.nothing_has_weight),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, check = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError):
        check()


def test_a_window_reset_by_multiplication_stays_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """optax and the torch backend of Keras reset a window by x 0, but NaN x 0 is NaN."""
    monkeypatch.setattr(boundary, "clear", multiplied)
    with pytest.raises((AssertionError, ArithmeticError)):
        test_edges.test_nonfinite_raise_discards_the_window("eager")
