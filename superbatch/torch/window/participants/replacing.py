"""Replacement of tensors of one kind wherever state is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .kept_tensors import SMALL_BYTES
from .reached import Reached


def replace_in(
    found: Reached,
    before: Mapping[tuple[int, Any], Any],
    kind: type[Tensor],
    make: Callable[[Tensor], Tensor],
) -> None:
    """Replace tensors of a kind in all tables and buffers.

    A large tensor where none of its shape was bound before is a result of the forward, and stays.

    Args:
        found: by the search for state.
        before: what was bound, by the identity of the table's content and the key.
        kind: of the tensors.
        make: returns the tensor in place of one.

    Examples:
        >>> import torch
        >>> from superbatch.torch.window.participants.reached import Table
        >>> table = Table("banks", {"a": torch.zeros(1)})
        >>> replace_in(Reached([table], [], {}), {}, Tensor, lambda tensor: tensor + 1)
        >>> table.content
        {'a': tensor([1.])}
    """
    buffers = found.buffer_tables()
    # Buffers are state whatever their size, so no earlier shape is asked for.
    of_buffers = set(map(id, buffers))
    for table in (*found.tables, *buffers):
        for key, value in table.read().items():
            if isinstance(value, kind):
                was = before.get((id(table.content), key))
                state = id(table) in of_buffers or getattr(was, "shape", None) == value.shape
                if state or value.nbytes <= SMALL_BYTES:
                    table.write(key, make(value))
            elif isinstance(value, tuple) and any(isinstance(item, kind) for item in value):
                # A list is written as a whole: a table of a list has one binding.
                table.write(key, [make(item) if isinstance(item, kind) else item for item in value])
