# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Assignment of rows to micro-batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from ..batch.split import near_equal
from ..errors import SplitError


class Group(NamedTuple):
    """`count` micro-batches of `size` rows each, from row `start` on."""

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
    found: list[Group] = []
    start = 0
    for size in sorted(set(sizes), reverse=True):
        count = sizes.count(size)
        found.append(Group(count, size, start))
        start += count * size
    return found


def leaves(data: Any) -> list[Any]:
    """Return the arrays of a batch; every one of them has one entry for each row.

    Raises:
        SplitError: there is none, one is sparse or ragged, or they are known to differ in length.
    """
    found = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not found:
        raise SplitError("The batch has no arrays, so there is nothing to split. Pass arrays.")
    for leaf in found:
        if type(leaf).__name__ in ("SparseTensor", "RaggedTensor", "JAXSparse", "BCOO", "BCSR"):
            raise SplitError(
                f"The batch has a {type(leaf).__name__}, which cannot be cut along its rows inside a "
                "compiled step. Pass it dense, padded and masked: tensor.to_tensor() of a ragged one."
            )
        if len(leaf.shape) == 0:
            raise SplitError("The batch has a scalar, which has no rows. Give it one entry for each row.")
    known = [leaf.shape[0] for leaf in found if leaf.shape[0] is not None]
    if len(set(known)) > 1:
        raise SplitError(
            f"The arrays of the batch have {known} rows, and every array is split by rows. Give all arrays "
            "the same number of rows."
        )
    return found


def part(data: Any, start: Any, stop: Any) -> Any:
    """Return rows `start` to `stop` of every array of a batch."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], data)
