# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Variables that had a gradient in a window: no other is to be touched, not even by its momentum.

Eager code reads it. A graph must be drawn before the window is there: for each set of variables that calls of
``add`` can have left, of which there is nearly always one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ..errors import WindowError

Pattern = frozenset[int]
MOST = 16


def of(gradients: Iterable[Any]) -> Pattern:
    """Return the positions of the gradients that are there.

    Examples:
        >>> sorted(of([1.0, None, 2.0]))
        [0, 2]
    """
    return frozenset(index for index, gradient in enumerate(gradients) if gradient is not None)


def unions(patterns: Iterable[Pattern]) -> list[Pattern]:
    """Return all unions of one or more of these patterns: those that their micro-batches can form.

    Raises:
        WindowError: there are more than a graph should have branches.

    Examples:
        >>> [sorted(union) for union in unions([frozenset([0]), frozenset([1]), frozenset([0, 1])])]
        [[0], [1], [0, 1]]
    """
    found: set[Pattern] = set()
    for pattern in patterns:
        found |= {pattern} | {pattern | other for other in found}
        if len(found) > MOST:
            raise WindowError(
                "The gradients of micro-batches are None for other variables each time: a window can end "
                f"with more than {MOST} sets of variables that had one, and a graph would need a branch for "
                "each. Call apply() eagerly, or pass zeros in place of None for variables that shall be "
                "updated in every window."
            )
    return sorted(found, key=lambda pattern: (len(pattern), sorted(pattern)))


def matches(present: Any, pattern: Pattern) -> Any:
    """Return whether just the variables of a pattern had a gradient.

    Examples:
        >>> bool(matches(tf.constant([2.0, 0.0]), frozenset([0])))
        True
    """
    wanted = [index in pattern for index in range(present.shape[0])]
    return tf.reduce_all((present > 0) == tf.constant(wanted))


def dispatch(present: Any, patterns: list[Pattern], update: Callable[[Pattern], None]) -> None:
    """Call `update` with the pattern that is there when the graph runs."""
    if len(patterns) == 1:
        return update(patterns[0])
    which = tf.argmax(tf.stack([tf.cast(matches(present, one), tf.int32) for one in patterns]))
    branches = [lambda one=one: update(one) for one in patterns]
    tf.switch_case(tf.cast(which, tf.int32), branches)
    return None
