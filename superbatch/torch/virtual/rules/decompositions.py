"""Operators that torch decomposes into simpler ones, and operators that run immediately on full tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

aten: Any = torch.ops.aten

# Packed sequences and the state that recurrent kernels save are read by kernels through raw memory, so rows
# of micro-batches cannot stand for them.
AT_ONCE = {
    aten._cudnn_rnn.default,
    aten._cudnn_rnn_backward.default,
    aten._pack_padded_sequence.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
}

# Not decomposed: many small operations would replace one (batch norm, cumsum), random numbers would come in
# another order (dropout), and the decomposition of `view` loses the shape of an empty tensor.
_WHOLE = {
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
    """Return torch's own decomposition of an operator into simpler ones; None without."""
    # Several results: the others are state that the kernel saves for its own backward. A decomposition may
    # compute it in another form, which the backward kernel would misread.
    if func.overloadpacket in _WHOLE or len(func._schema.returns) > 1:
        return None
    from torch._decomp import decomposition_table  # here: it imports sympy, which is slow to load

    return decomposition_table.get(func)


def is_composite(func: Any) -> bool:
    """Return whether torch implements the operator by other operators (CompositeImplicitAutograd)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
