"""Computation in a higher precision than the code requests.

A model converted to float64 still has float32 tensors: ``x.float()``, ``torch.zeros(3)``, class weights. The
mode converts such operands of each operation, in the backward too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}
_COMPLEX_BITS = {torch.complex32: 16, torch.complex64: 32, torch.complex128: 64}


class ComputeIn(TorchDispatchMode):
    """Dispatch mode that converts floating-point operands of a lower dtype to a higher one.

    Views and in-place operations keep the dtype of their tensor. Conversions and factories of a lower dtype
    (``x.float()``, ``torch.zeros(3)``) return the higher one.

    Args:
        dtype: float32 or float64.

    Examples:
        >>> with ComputeIn(torch.float64):
        ...     print((torch.ones(2) / 3).dtype, torch.ones(2).bfloat16().dtype)
        torch.float64 torch.float64
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside; wrapping the mode would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # In place: the written tensor keeps its dtype, so the operands are converted to it.
        if func._schema.is_mutable:
            return func(*self._like_first(args), **kwargs)
        # A view shares memory with its base, so it keeps the dtype. lift_fresh (of torch.tensor()) is a view
        # by its schema only.
        if func.is_view and "lift_fresh" not in str(func):
            return func(*args, **kwargs)
        # Autograd converts a gradient to the dtype of its parameter.
        if "_to_copy" in str(func) and _to_a_parameter():
            return func(*args, **kwargs)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = self._raised(kwargs["dtype"])
        # Results as well: torch.zeros(3) has no operand to convert.
        return tree_map(
            self._convert, func(*tree_map(self._convert, args), **tree_map(self._convert, kwargs))
        )

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Tensor) and self._raised(value.dtype) is not value.dtype:
            return value.to(self._raised(value.dtype))
        return value

    def _raised(self, dtype: torch.dtype) -> torch.dtype:
        bits = _BITS[self.dtype]
        if _BITS.get(dtype, bits) < bits:
            return self.dtype
        return self.dtype.to_complex() if _COMPLEX_BITS.get(dtype, bits) < bits else dtype

    def _like_first(self, args: Any) -> Any:
        """Return the arguments of an in-place operation, floating-point tensors in the dtype of the first."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not (first.is_floating_point() or first.is_complex()):
            return args

        def convert(value: Any) -> Any:
            other = isinstance(value, Tensor) and value.dtype != first.dtype
            return value.to(first.dtype) if other and value.is_floating_point() else value

        return (first, *tree_map(convert, tuple(args[1:])))


def _to_a_parameter() -> bool:
    """Return whether autograd is converting a gradient to the dtype of its tensor.

    Conversions in a forward do not count, even if a checkpoint recomputes that forward within the backward.
    """
    # Private: torch has no public way to find out whether a backward runs in this thread.
    if torch._C._current_graph_task_id() == -1:
        return False
    if not torch.is_grad_enabled():
        return True
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("checkpoint.py"):
        frame = frame.f_back
    return frame is None
