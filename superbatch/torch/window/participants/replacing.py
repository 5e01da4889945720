"""Replacement of tensors of one class in all bindings."""

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
    """Replace tensors of a class in all tables and buffers.

    A large tensor stays if its name was not bound to a tensor of that shape before. It is then probably a
    result of the forward.

    Args:
        found: result of the search for state.
        before: earlier values, by the id of the table's content and the key.
        kind: class of the tensors.
        make: returns the replacement of a tensor.

    Examples:
        >>> import torch
        >>> from superbatch.torch.window.participants.reached import Table
        >>> table = Table("banks", {"a": torch.zeros(1)})
        >>> replace_in(Reached([table], [], {}), {}, Tensor, lambda tensor: tensor + 1)
        >>> table.content
        {'a': tensor([1.])}
    """
    buffers = found.buffer_tables()
    # Buffers are always state, so their size and earlier shape do not matter.
    of_buffers = set(map(id, buffers))
    for table in (*found.tables, *buffers):
        for key, value in table.read().items():
            if isinstance(value, kind):
                was = before.get((id(table.content), key))
                state = id(table) in of_buffers or getattr(was, "shape", None) == value.shape
                if state or value.nbytes <= SMALL_BYTES:
                    table.write(key, make(value))
            elif isinstance(value, tuple) and any(isinstance(item, kind) for item in value):
                # A list is written as a whole, because its table has one binding.
                table.write(key, [make(item) if isinstance(item, kind) else item for item in value])
