"""Operators that torch decomposes into simpler ones, and operators that run immediately on full tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

aten: Any = torch.ops.aten

# Kernels read packed sequences, and the state that recurrent kernels save, as raw memory of the whole batch.
IMMEDIATE = {
    aten._cudnn_rnn.default,
    aten._cudnn_rnn_backward.default,
    aten._pack_padded_sequence.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
}

# Not decomposed. Batch norm and cumsum would become many small operations. Dropout would draw its numbers in
# another order. The decomposition of `view` loses the shape of an empty tensor.
_NOT_DECOMPOSED = {
    aten.native_batch_norm,
    aten.index_put,
    aten.embedding_dense_backward,
    aten.native_dropout,
    aten.cumprod,
    aten.cumsum,
    aten.logcumsumexp,
    aten.view,
}


@cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """Return torch's own decomposition of an operator into simpler ones; None if it has none."""
    # With several results, some are state that the kernel saves for its backward. A decomposition may compute
    # it in another form, which the backward kernel would misread.
    if func.overloadpacket in _NOT_DECOMPOSED or len(func._schema.returns) > 1:
        return None
    from torch._decomp import decomposition_table  # not at the top: it imports sympy, which is slow

    return decomposition_table.get(func)


def is_composite(func: Any) -> bool:
    """Return whether torch implements the operator with other operators (CompositeImplicitAutograd)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
