"""Operators that torch defines by simpler ones, and those that run at once on full tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

aten: Any = torch.ops.aten

# Their results are read by operators that read memory itself.
# Recurrent kernels keep a form of their own for their backward, which leaves out what nobody wants.
AT_ONCE = {
    aten._cudnn_rnn.default,
    aten._cudnn_rnn_backward.default,
    aten._pack_padded_sequence.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
}

# Decompositions that put many small operations, or another order of random numbers, in the place of one; that
# of a view forgets the shape of what is empty.
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
    """Return torch's own decomposition of an operator into simpler ones, if there is one.

    None of an operator with several results: the others are what its kernel keeps for its backward, in a form
    of its own, and a decomposition may give another.
    """
    if func.overloadpacket in _WHOLE or len(func._schema.returns) > 1:
        return None
    from torch._decomp import decomposition_table  # loads sympy: only where it is needed

    return decomposition_table.get(func)


def is_composite(func: Any) -> bool:
    """Tell whether torch defines the operator by others alone."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
