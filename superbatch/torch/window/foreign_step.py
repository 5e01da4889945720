"""Optimizers that are not torch's: what a failed step of theirs has changed, as far as that can be proven."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .wrapped import NOT_ITS_OWN

PLAIN = (int, float, complex, str, bytes, type(None))  # what cannot change in place

# Attributes and functions that give the memory of a tensor without its version counter.
_HIDING = {
    *("data", "data_ptr", "set_", "numpy", "from_numpy", "frombuffer", "from_dlpack", "to_dlpack"),
    *("storage", "untyped_storage", "__array_interface__", "__cuda_array_interface__"),
    *("_unsafe_preserve_version_counter", "inference_mode", "exec", "eval", "__import__", "import_module"),
}
_LOOKED_INTO = (list, tuple, set, dict, MethodType, partial, staticmethod, classmethod, property)
_TRUSTED = (sys.stdlib_module_names | {"torch"}) - {"ctypes", "_ctypes", "mmap", "importlib"}


class Attributes:
    """Attributes of an optimizer before a step: numbers and texts can be restored, the rest is compared.

    Args:
        optimizer: any; its state and parameter groups are left out.

    Examples:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> sgd.steps = 3
        >>> before = Attributes(sgd)
        >>> sgd.steps = 4
        >>> before.can_be_put_back, before.put_back(), sgd.steps
        (True, None, 3)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._values = self._own()
        self._inside = {name: _inside(value) for name, value in self._values.items()}

    @property
    def can_be_put_back(self) -> bool:
        """False if anything else than a number or a text has changed."""
        now = self._own()
        for name in self._values.keys() | now.keys():
            before, after = self._values.get(name), now.get(name)
            if isinstance(before, PLAIN) and isinstance(after, PLAIN):
                continue
            if before is not after or _inside(after) != self._inside[name]:
                return False
        return True

    def put_back(self) -> None:
        """Restore numbers and texts."""
        now = vars(self.optimizer)
        for name in self._own().keys() - self._values.keys():
            del now[name]
        now.update({name: value for name, value in self._values.items() if isinstance(value, PLAIN)})

    def _own(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.optimizer).items() if name not in NOT_ITS_OWN}


def _inside(value: Any) -> Any:
    """Return what shows a change inside of a tensor, or of a container of tensors and numbers."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        return [(id(each), _inside(each) if isinstance(each, Tensor) else None) for each in value]
    return None


def shows_its_writes(optimizer: Optimizer) -> bool:
    """Return whether version counters show everything that the code of an optimizer writes to tensors.

    That is so where its functions, and all those that they may call, are Python's or torch's, and none takes
    the memory of a tensor by another way, such as ``.data``.

    Examples:
        >>> import torch
        >>> class Plain(torch.optim.Optimizer):
        ...     def step(self):
        ...         self.param_groups[0]["params"][0].detach().sub_(1)
        >>> class Hidden(Plain):
        ...     def step(self):
        ...         self.param_groups[0]["params"][0].data -= 1
        >>> parameter = torch.zeros(1, requires_grad=True)
        >>> shows_its_writes(Plain([parameter], {})), shows_its_writes(Hidden([parameter], {}))
        (True, False)
    """
    waiting: list[Any] = [type(optimizer), *vars(optimizer).values()]
    seen: list[Any] = []  # held: an identity is that of a living object
    known: set[int] = set()
    while waiting:
        each = waiting.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        seen.append(each)
        if _is_trusted(each):
            continue
        found = _reached(each)
        if found is None:
            return False
        waiting += found
    return True


def _reached(each: Any) -> list[Any] | None:
    """Return what an object of the optimizer's code may call; None if that is not known, or hides writes."""
    if isinstance(each, ModuleType):  # that is not trusted
        return None
    if isinstance(each, type):
        return [inner for kind in each.__mro__ for inner in vars(kind).values()]
    if isinstance(each, FunctionType):
        return _names_of(inspect.unwrap(each))
    if isinstance(each, MethodType):
        return [each.__func__, each.__self__]
    if isinstance(each, staticmethod | classmethod):
        return [each.__func__]
    if isinstance(each, property):
        return [each.fget, each.fset, each.fdel]
    if isinstance(each, partial):
        return [each.func, *each.args, *each.keywords.values()]
    if isinstance(each, list | tuple | set | dict):
        return [*each, *each.values()] if isinstance(each, dict) else [*each]
    if not isinstance(type(each).__module__, str) or not hasattr(each, "__dict__"):
        return None if callable(each) else []
    return [type(each), *vars(each).values()]


def _names_of(function: FunctionType) -> list[Any] | None:
    """Return the globals and closed-over objects that a function names; None if a name hides writes."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    names: set[str] = set()
    for code in _codes(function.__code__):
        names.update(code.co_names)
        if "getattr" in code.co_names or "setattr" in code.co_names:
            names.update(each for each in code.co_consts if isinstance(each, str))
    if names & _HIDING:
        return None
    return [*cells, *(function.__globals__[name] for name in names if name in function.__globals__)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def _is_trusted(each: Any) -> bool:
    """Return whether an object is Python's or torch's, or holds no code."""
    if isinstance(each, (*PLAIN, Tensor)):
        return True
    if isinstance(each, _LOOKED_INTO):
        return False
    if isinstance(each, ModuleType):
        return each.__name__.partition(".")[0] in _TRUSTED
    if isinstance(each, FunctionType):
        each = inspect.unwrap(each)
    own = each if isinstance(each, type | FunctionType) or inspect.isroutine(each) else type(each)
    return str(getattr(own, "__module__", None) or "builtins").partition(".")[0] in _TRUSTED
