"""Gradients in float64 of parameters in a lower precision, without a copy of the model.

Each use of a parameter converts it to float64; the conversion is freed after the operation, and made again in
the backward. The gradient is recorded before autograd rounds it to the dtype of the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .sketch import sketch

# Properties that autograd differentiates. Other properties and the methods below get the parameter itself.
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_NOT_DIFFERENTIATED = frozenset(
    {
        "__get__", "__set__", "__delete__", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad_", "retain_grad", "detach", "data_ptr", "untyped_storage", "size", "dim", "numel",
    }
)  # fmt: skip
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class WideParameters(TorchFunctionMode):
    """Function mode that converts parameters to float64 for each operation that autograd differentiates.

    Some operations bypass function modes: those of an `autograd.Function` or a scripted module. Gradients
    through them are rounded to the dtype of the parameter.

    Args:
        parameters: parameters to differentiate with respect to; none is a tensor subclass.

    Attributes:
        bypassed: a gradient was rounded, or the loss needs a copy of the model.

    Examples:
        >>> weight = torch.nn.Parameter(torch.tensor([1 / 3]).bfloat16())
        >>> wide = WideParameters([weight])
        >>> with wide.entered():
        ...     loss = (weight * torch.tensor([0.1], dtype=torch.float64)).sum()
        ...     sums = wide.gradient(loss, torch.ones_like(loss))
        >>> float(sums[0, 0]), wide.bypassed
        (0.1, False)
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.bypassed = False
        self._parameters = list(parameters)
        self._rows = {id(parameter): row for row, parameter in enumerate(parameters)}
        self._edges = [get_gradient_edge(parameter) for parameter in parameters]
        self._sums: Tensor | None = None  # gradients of the differentiation in progress
        # (index of the parameter, dtype) by the address of its conversion
        self._alive: dict[int, tuple[int, torch.dtype]] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Convert parameters inside the context, in backward passes too."""
        with saved_tensors_hooks(self._pack, self._unpack), self:
            yield

    def gradient(self, loss: Tensor, seed: Tensor, *, backward: bool = False) -> Tensor:
        """Differentiate a loss that was computed inside `entered`; return the sketch of each gradient.

        `backward`: use backward(), for losses that do not support grad(); the caller restores ``.grad``.

        Raises:
            RuntimeError: the loss supports backward() only.
        """
        self._sums = sketch([None] * len(self._parameters))
        try:
            # As edges, because with tensors as arguments torch disables this mode during the backward. Then a
            # checkpoint that recomputes its forward would read the parameters themselves.
            outputs = [get_gradient_edge(loss)]
            if backward:
                torch.autograd.backward(outputs, [seed])  # type: ignore[arg-type]
                rounded = [parameter.grad for parameter in self._parameters]
            else:
                rounded = list(torch.autograd.grad(outputs, self._edges, [seed], allow_unused=True))
            self.bypassed |= any(gradient is not None for gradient in rounded)
            return self._sums + sketch(rounded)
        finally:
            self._sums = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._sums is None and func in _DIFFERENTIATE:
            self._refuse(args, kwargs)
        if func == _DTYPE and id(args[0]) in self._rows:  # modules compare it with the dtype of their input
            return _wide(args[0])
        if func in _DIFFERENTIATE or self._is_not_differentiated(func) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if peek_interpreter_stack() is not None:  # a transform, such as vmap
            return func(*args, **kwargs)
        return func(*tree_map(self._widen, args), **tree_map(self._widen, kwargs))

    def _is_not_differentiated(self, func: Any) -> bool:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
        return name in _NOT_DIFFERENTIATED

    def _refuse(self, *arguments: Any) -> None:
        """Raise if the loss computes gradients of parameters, which this mode intercepts."""
        found: list[bool] = []
        tree_map(lambda value: found.append(id(value) in self._rows), arguments)
        if any(found):
            self.bypassed = True
            raise RuntimeError("a loss that computes gradients of parameters needs a copy of the model")

    def _widen(self, value: Any) -> Any:
        row = self._rows.get(id(value))
        if row is None or not value.requires_grad:
            return value
        wide = _Widened.apply(value, self, row)
        assert isinstance(wide, Tensor)
        if wide.dtype is not value.dtype:
            address = wide.untyped_storage().data_ptr()
            self._alive[address] = (row, wide.dtype)
            weakref.finalize(wide, self._alive.pop, address, None)
        return wide

    def add_gradient(self, row: int, gradient: Tensor) -> None:
        """Add the float64 gradient of one use of the parameter with index `row`."""
        if self._sums is None:  # the loss itself calls backward()
            self.bypassed = True
            raise RuntimeError("a loss that calls backward() needs a copy of the model")
        self._sums[row] += sketch([gradient])[0]

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor._version or tensor.is_conj() or tensor.is_neg():
            return tensor
        row, dtype = self._alive.get(tensor.untyped_storage().data_ptr(), (-1, None))
        if tensor.dtype is not dtype:
            return tensor
        return row, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        row, dtype, *form = packed
        return self._parameters[row].detach().to(dtype).as_strided(*form)


class _Widened(torch.autograd.Function):
    """Conversion of a parameter that records its gradient and passes none to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, wide: WideParameters, row: int) -> Tensor:
        ctx.wide, ctx.row = wide, row
        dtype = _wide(parameter)
        return parameter.view_as(parameter) if parameter.dtype is dtype else parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.wide.add_gradient(ctx.row, gradients[0])
        return None, None, None


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.complex128 if parameter.is_complex() else torch.float64
