"""Record of an optimizer's contents before its step, to detect whether a failed step changed them."""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..devices import local_part

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types of values that cannot change in place."""

# Small tensors, such as step counts, are compared exactly; a sum could in theory miss a change.
SMALL = 1 << 12  # elements of the largest tensor that is copied; of larger ones a sum is kept
LONGEST, MOST = 1 << 12, 1 << 16  # objects read in one container, and in all

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Contents:
    """Record of parameters, and of all objects that their optimizer refers to.

    Numbers and strings among the optimizer's own attributes are not compared; see `restore_numbers`.

    A tensor's version counter does not show writes through `.data`, NumPy or a foreign kernel. So its bits
    are recorded: a copy of a small tensor, a sum over the bits of a large one.

    Args:
        optimizer: read through its attributes, state and parameter groups.
        parameters: the parameters that it updates.

    Examples:
        >>> parameter = torch.zeros(2, requires_grad=True)
        >>> sgd = torch.optim.SGD([parameter])
        >>> before = Contents(sgd, [parameter])
        >>> before.is_unchanged()
        True
        >>> parameter.data[0] = 1.0
        >>> before.is_unchanged()
        False
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        own = vars(optimizer)
        # Numbers such as a call counter change in each step; `restore_numbers` restores them.
        self._numbers = {name: value for name, value in own.items() if isinstance(value, PLAIN)}
        self._before = self._read()

    def restore_numbers(self) -> None:
        """Restore numbers and strings among the optimizer's own attributes, and delete new ones."""
        own = vars(self._optimizer)
        for name in [name for name in own if name not in self._numbers and isinstance(own[name], PLAIN)]:
            del own[name]
        own.update(self._numbers)

    def is_unchanged(self) -> bool:
        """Return whether all recorded contents are unchanged; False also if an object cannot be read."""
        before, now = self._before, self._read()
        # Unreadable objects count as changed: the caller then refuses further updates, which is safe.
        if before is None or now is None or not (before.is_known and now.is_known):
            return False
        return before.plain == now.plain and all(map(torch.equal, before.tensors, now.tensors))

    def parameters_changed(self) -> bool:
        """Return whether a parameter has certainly changed; False if that is unknown."""
        now = _read(list(self._parameters))
        # With fewer tensors than now, the first reading ended early and there is nothing to compare with.
        if self._before is None or now is None or len(self._before.tensors) < len(now.tensors):
            return False
        # The parameters come first in both readings.
        return not all(map(torch.equal, self._before.tensors[: len(now.tensors)], now.tensors))

    def _read(self) -> _Reading | None:
        own = vars(self._optimizer).items()
        others = {name: value for name, value in own if not isinstance(value, PLAIN)}
        return _read([*self._parameters, others])


def _read(objects: list[Any]) -> _Reading | None:
    """Return the contents of objects; None if reading them failed, e.g. for lack of memory."""
    try:
        with torch.no_grad():
            return _Reading(objects)
    except (RuntimeError, TypeError, MemoryError):  # e.g. a tensor subclass without these operators
        return None


class _Reading:
    """Contents of objects, up to the first that cannot be read.

    Attributes:
        plain: values that cannot change in place, and the types of all other objects.
        tensors: bits of tensors.
        is_known: False if an object could not be read.
    """

    def __init__(self, objects: list[Any]) -> None:
        self.plain: list[Any] = []
        self.tensors: list[Tensor] = []
        self.is_known = True
        # By id. The objects are held, because the id of a freed object may be reused.
        self._seen: dict[int, tuple[int, Any]] = {}
        waiting = objects[::-1]
        # A loop, because recursion into deep containers would reach Python's limit.
        while waiting and self.is_known:
            waiting += self._inside(waiting.pop())[::-1]
            self.is_known = self.is_known and len(self.plain) + len(waiting) <= MOST
        self._seen.clear()  # frees tensors that the optimizer replaces by new ones

    def _inside(self, each: Any) -> list[Any]:
        """Record an object, and return the objects that it contains."""
        if isinstance(each, PLAIN):
            self.plain.append(repr(each) if isinstance(each, float) else each)  # NaN is not equal to itself
            return []
        # For an object seen before, e.g. a shared list, its index is compared.
        if id(each) in self._seen:
            self.plain.append(("again", self._seen[id(each)][0]))
            return []
        self._seen[id(each)] = len(self._seen), each
        # The type too, so that a tensor replaced by a number counts as a change.
        self.plain.append(type(each))
        if isinstance(each, Tensor):
            part = local_part(each)  # each rank compares its own shard of a DTensor
            self.is_known = type(part) in (Tensor, torch.nn.Parameter)
            self.tensors += _bits(part) if self.is_known else []
            return []
        # Code does not change in a step.
        if isinstance(each, _CODE):
            return []
        if type(each) in (list, tuple):
            self.is_known = len(each) <= LONGEST
            return list(each) if self.is_known else []
        # OrderedDict and defaultdict too; a user's own dict subclass may compute its items.
        if isinstance(each, dict) and type(each).__module__ in ("builtins", "collections"):
            self.is_known = len(each) <= LONGEST
            return [*each.keys(), *each.values()] if self.is_known else []
        if isinstance(each, Optimizer) or type(each) is SimpleNamespace:
            return [vars(each)]
        # An object of another class may keep state in C or in slots.
        self.is_known = False
        return []


def _bits(tensor: Tensor) -> list[Tensor]:
    """Return tensors to compare in place of a tensor's bits: a copy, or the sum of its 8-byte words.

    It is practically impossible that a step changes the words and leaves their sum modulo 2^64 unchanged.
    """
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        return [*_bits(tensor.indices()), *_bits(tensor.values())]
    flat = tensor.reshape(-1)
    # Complex dtypes have no integer view.
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    flat = flat.view(_INTEGERS[size])  # integers, because NaN is not equal to itself
    if len(flat) <= SMALL:
        return [flat.clone()]
    # int64 words need an address that is a multiple of 8, which a view may not have.
    if flat.storage_offset() * size % 8:
        return [flat.sum(dtype=torch.int64)]
    # The last bytes that do not fill a word are copied.
    rest = len(flat) % (8 // size)
    return [flat[: len(flat) - rest].view(torch.int64).sum(), flat[len(flat) - rest :].clone()]
