"""Leading dimensions of operators on several matrices, which torch broadcasts."""

from __future__ import annotations

from typing import Any

import torch

from .calls import Call

aten: Any = torch.ops.aten

# Operators whose second tensor holds vectors [..., n]: pivots, or the factors of reflections.
_WITH_VECTORS = {aten.linalg_householder_product, aten.linalg_lu_solve, aten.lu_unpack}


def leading_alike(call: Call) -> bool:
    """Return whether all tensors have the same number of leading dimensions."""
    # Otherwise broadcasting aligns them from the right, and only some have the samples in dimension 0.
    return len({value.meta.dim() - _own(call, index) for index, value in enumerate(call.tensors)}) == 1


def _own(call: Call, index: int) -> int:
    """Return 2 for an argument that holds matrices, 1 for one that holds vectors."""
    if index != 1:
        return 2
    packet, (matrices, second, *_) = call.func.overloadpacket, call.tensors
    if packet is aten._linalg_solve_ex:  # solve(A [N, n, n], b [N, n]): b holds vectors
        return 1 if second.meta.shape == matrices.meta.shape[:-1] else 2
    return 1 if packet in _WITH_VECTORS else 2
