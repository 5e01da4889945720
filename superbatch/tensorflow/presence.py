# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Sets ("patterns") of variables that had a gradient in a window; the optimizer must not touch others.

A gradient of 0 would still move a variable by its momentum. Eager code reads the pattern of the window. A
graph is traced before the window exists, so it has a branch for each pattern that the calls of ``add`` can
form; nearly always there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ..errors import WindowError

Pattern = frozenset[int]
MOST = 16  # most branches of a graph


def of(gradients: Iterable[Any]) -> Pattern:
    """Return the pattern of a list of gradients: the indices of those that are not None.

    Examples:
        >>> sorted(of([1.0, None, 2.0]))
        [0, 2]
    """
    return frozenset(index for index, gradient in enumerate(gradients) if gradient is not None)


def unions(patterns: Iterable[Pattern]) -> list[Pattern]:
    """Return all unions of one or more patterns: the patterns that windows of such micro-batches can have.

    Raises:
        WindowError: there are more than 16.

    Examples:
        >>> [sorted(union) for union in unions([frozenset([0]), frozenset([1]), frozenset([0, 1])])]
        [[0], [1], [0, 1]]
    """
    formed: set[Pattern] = set()
    for pattern in patterns:
        formed |= {pattern} | {pattern | other for other in formed}
        if len(formed) > MOST:
            raise WindowError(
                f"A window may have gradients for more than {MOST} different sets of variables, and the "
                "graph of apply() would need a branch for each set. Call apply() eagerly, or pass zeros in "
                "place of None to add()."
            )
    return sorted(formed, key=lambda pattern: (len(pattern), sorted(pattern)))


def matches(present: Any, pattern: Pattern) -> Any:
    """Return whether the variables of a pattern, and no others, had a gradient.

    Args:
        present: for each variable, in how many micro-batches it had a gradient.
        pattern: the pattern.

    Examples:
        >>> bool(matches(tf.constant([2.0, 0.0]), frozenset([0])))
        True
    """
    wanted = [index in pattern for index in range(present.shape[0])]
    return tf.reduce_all((present > 0) == tf.constant(wanted))


def dispatch(present: Any, patterns: list[Pattern], update: Callable[[Pattern], None]) -> None:
    """Call `update` with the pattern of the window; in a graph, by a branch for each possible pattern."""
    if len(patterns) == 1:
        return update(patterns[0])  # no branches needed
    which = tf.argmax(tf.stack([tf.cast(matches(present, one), tf.int32) for one in patterns]))
    branches = [lambda one=one: update(one) for one in patterns]
    tf.switch_case(tf.cast(which, tf.int32), branches)
    return None
