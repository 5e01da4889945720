"""Functions of several matrices, whose leading dimensions torch broadcasts."""

from __future__ import annotations

from typing import Any

import torch

from .calls import Call

aten: Any = torch.ops.aten

# Of these the second tensor is of vectors: pivots, or factors of reflections.
_WITH_VECTORS = {aten.linalg_householder_product, aten.linalg_lu_solve, aten.lu_unpack}


def leading_alike(call: Call) -> bool:
    """Return whether all have the same number of leading dimensions."""
    return len({value.meta.dim() - _own(call, index) for index, value in enumerate(call.tensors)}) == 1


def _own(call: Call, index: int) -> int:
    """Return the number of dimensions of the matrix, or of the vector."""
    if index != 1:
        return 2
    packet, (matrices, second, *_) = call.func.overloadpacket, call.tensors
    if packet is aten._linalg_solve_ex:
        return 1 if second.meta.shape == matrices.meta.shape[:-1] else 2
    return 1 if packet in _WITH_VECTORS else 2
