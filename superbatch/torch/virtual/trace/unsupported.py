"""Errors for unsupported tensors, raised at the statement that makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dis import get_instructions
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from superbatch.errors import InputError, WindowError

from .tensor import VirtualTensor, hollow_error

_SET_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue] a descriptor


def sets_data(models: Iterable[nn.Module]) -> bool:
    """Return whether the class of a module has code that assigns to ``.data``.

    Examples:
        >>> sets_data([nn.Linear(1, 1)])
        False
    """
    # Otherwise `RefuseVirtualData` is not active: under any function mode, torch's transformer layers skip
    # their fused kernels, which return other numbers at padded positions.
    return any(map(_has_data_set, {type(module) for model in models for module in model.modules()}))


@cache
def _has_data_set(kind: type) -> bool:
    own = [one for one in kind.__mro__ if not one.__module__.startswith("torch.")]
    functions = [
        function for one in own for function in vars(one).values() if isinstance(function, FunctionType)
    ]
    return any(
        # A fast test before the disassembly.
        "data" in function.__code__.co_names
        and any(step.opname == "STORE_ATTR" and step.argval == "data" for step in get_instructions(function))
        for function in functions
    )


class RefuseVirtualData(TorchFunctionMode):
    """Function mode that raises for ``real.data = virtual``, for which no operator is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, unless it assigns a virtual tensor to the .data of a tensor."""
        if len(args) == 2 and func == _SET_DATA and isinstance(args[1], VirtualTensor):
            raise hollow_error(args[0])
        return func(*args, **kwargs) if kwargs else func(*args)


def refuse_nested(leaf: Any) -> Any:
    """Return a leaf of the batch unchanged; raise `InputError` if it is a nested tensor."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        raise InputError(
            "virtual_batch cannot take a nested tensor (torch.nested), which has no dimension of samples. "
            "Pass torch.nested.to_padded_tensor(x, 0.0) and the lengths or a mask."
        )
    return leaf


def refuse_jagged(*args: Any, **kwargs: Any) -> Any:
    """Raise `WindowError`, because a nested tensor cannot be made from a virtual one."""
    raise WindowError(
        "A nested tensor (torch.nested, layout=torch.jagged) cannot be made from a virtual tensor. "
        "Use a padded tensor and a mask in the block."
    )


aten: Any = torch.ops.aten
# Operators for which `dispatch` raises, if this release of torch has them.
REFUSED = {
    getattr(aten, name).default: refuse_jagged
    for name in ("_nested_view_from_jagged", "_nested_view_from_jagged_copy")
    if hasattr(aten, name)
}
