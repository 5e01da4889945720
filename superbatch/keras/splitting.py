# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Division of a batch into micro-batches of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from ..batch.split import near_equal
from ..errors import SplitError


class Group(NamedTuple):
    """A group of `count` micro-batches of `size` rows each; the first row of the group is `start`."""

    count: int
    size: int
    start: int


def groups(rows: int, microbatch_size: int) -> list[Group]:
    """Divide a batch into near-equal micro-batches: one group, or two whose sizes differ by one.

    Examples:
        >>> [tuple(group) for group in groups(10, 4)]
        [(1, 4, 0), (2, 3, 4)]
        >>> [tuple(group) for group in groups(3, 8)]
        [(1, 3, 0)]
    """
    sizes = near_equal(rows, microbatch_size)
    divided: list[Group] = []
    start = 0
    for size in sorted(set(sizes), reverse=True):
        count = sizes.count(size)
        divided.append(Group(count, size, start))
        start += count * size
    return divided


def blocks(rows: int, microbatch_size: int) -> list[range]:
    """Return the rows of each micro-batch as a block of neighbours.

    Examples:
        >>> blocks(5, 2)
        [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [
        range(group.start + i * group.size, group.start + (i + 1) * group.size)
        for group in groups(rows, microbatch_size)
        for i in range(group.count)
    ]


def leaves(data: Any) -> list[Any]:
    """Return the arrays of a batch, each with one entry for every row.

    Raises:
        SplitError: there are none, one is sparse, ragged or a scalar, or their known lengths differ.
    """
    arrays = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not arrays:
        raise SplitError("The batch has no arrays, so there is nothing to split. Pass arrays.")
    for leaf in arrays:
        if type(leaf).__name__ in ("SparseTensor", "RaggedTensor", "JAXSparse", "BCOO", "BCSR"):
            raise SplitError(
                f"The batch has a {type(leaf).__name__}, which cannot be cut along its rows inside a "
                "compiled step. Pass a dense array, padded and masked, such as ragged.to_tensor()."
            )
        if len(leaf.shape) == 0:
            raise SplitError("The batch has a scalar, which has no rows. Give it one entry for each row.")
    known = [leaf.shape[0] for leaf in arrays if leaf.shape[0] is not None]
    if len(set(known)) > 1:
        raise SplitError(
            f"The arrays of the batch have {known} rows, and every array is split by rows. Give all arrays "
            "the same number of rows."
        )
    return arrays


def part(data: Any, start: Any, stop: Any) -> Any:
    """Return rows `start` to `stop` of every array of a batch."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], data)
