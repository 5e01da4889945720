"""Contents of an optimizer that is not torch's before its step, to tell whether a step has changed them."""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..devices import local_part

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""What cannot change in place."""

# Small tensors, e.g. step counts, are compared exactly; a sum may miss a change in theory.
SMALL = 1 << 12  # elements of a tensor that is copied; of a larger one a sum is kept
LONGEST, MOST = 1 << 12, 1 << 16  # objects in one container, and in all; what holds more is not read

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Contents:
    """Parameters, and everything that their optimizer reaches: a failed step may have written it.

    Its own attributes that are numbers or texts are left out: `put_back` restores them.

    A tensor's version counter does not show what `.data`, NumPy or a kernel of somebody else's has written,
    so its bits are kept: a copy of a small tensor, and a sum over the bits of a large one.

    Args:
        optimizer: read through its attributes, state and parameter groups.
        parameters: that it updates.

    Examples:
        >>> parameter = torch.zeros(2, requires_grad=True)
        >>> sgd = torch.optim.SGD([parameter])
        >>> before = Contents(sgd, [parameter])
        >>> before.same()
        True
        >>> parameter.data[0] = 1.0
        >>> before.same()
        False
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        own = vars(optimizer)
        # Python numbers change at each step (a call counter), and `put_back` restores them.
        self._numbers = {name: value for name, value in own.items() if isinstance(value, PLAIN)}
        self._before = self._read()

    def put_back(self) -> None:
        """Restore numbers and texts among the optimizer's own attributes."""
        own = vars(self._optimizer)
        # A number that the step has added: its absence is part of the state before.
        for name in [name for name in own if name not in self._numbers and isinstance(own[name], PLAIN)]:
            del own[name]
        own.update(self._numbers)

    def same(self) -> bool:
        """Return whether nothing else has changed; False also where there is what cannot be read."""
        before, now = self._before, self._read()
        # Unknown contents count as changed: the caller then declares the update torn, which is safe.
        if before is None or now is None or not (before.is_known and now.is_known):
            return False
        return before.plain == now.plain and all(map(torch.equal, before.tensors, now.tensors))

    def parameters_moved(self) -> bool:
        """Return whether a parameter has changed; False where that cannot be told."""
        now = _read(list(self._parameters))
        # Fewer tensors before than now: the first reading ended early, so nothing can be compared.
        if self._before is None or now is None or len(self._before.tensors) < len(now.tensors):
            return False
        # The parameters were read first, whatever came after them.
        return not all(map(torch.equal, self._before.tensors[: len(now.tensors)], now.tensors))

    def _read(self) -> _Reading | None:
        own = vars(self._optimizer).items()
        others = {name: value for name, value in own if not isinstance(value, PLAIN)}
        return _read([*self._parameters, others])


def _read(objects: list[Any]) -> _Reading | None:
    """Return the contents of objects; None if reading them failed, as without memory for it."""
    try:
        with torch.no_grad():
            return _Reading(objects)
    except (RuntimeError, TypeError, MemoryError):  # of a tensor that is not like others
        return None


class _Reading:
    """Contents of objects, up to the first that cannot be read.

    Attributes:
        plain: values that cannot change in place, and the kinds of the other objects.
        tensors: bits of tensors.
        is_known: False if an object could not be read.
    """

    def __init__(self, objects: list[Any]) -> None:
        self.plain: list[Any] = []
        self.tensors: list[Tensor] = []
        self.is_known = True
        self._seen: dict[int, tuple[int, Any]] = {}  # by identity; held, so that none is taken for another
        waiting = objects[::-1]
        # A loop and no recursion: optimizers with deep containers would reach Python's limit.
        while waiting and self.is_known:
            waiting += self._inside(waiting.pop())[::-1]
            self.is_known = self.is_known and len(self.plain) + len(waiting) <= MOST
        self._seen.clear()  # an optimizer may put new tensors in the place of its old ones

    def _inside(self, each: Any) -> list[Any]:
        """Note an object, and return what it holds."""
        if isinstance(each, PLAIN):
            self.plain.append(repr(each) if isinstance(each, float) else each)  # NaN is not equal to itself
            return []
        # Seen again, e.g. a shared list: its index among the seen objects is compared instead.
        if id(each) in self._seen:
            self.plain.append(("again", self._seen[id(each)][0]))
            return []
        self._seen[id(each)] = len(self._seen), each
        # The type too: a tensor replaced by a number must differ.
        self.plain.append(type(each))
        if isinstance(each, Tensor):
            part = local_part(each)  # of a DTensor: each rank answers for the part that it holds
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
        # A user's object may hide state in C or in slots: unknown.
        self.is_known = False
        return []


def _bits(tensor: Tensor) -> list[Tensor]:
    """Return tensors that are equal where a tensor has the same bits: a copy, or the sum of its 8-byte words.

    What one step adds to the words of a tensor adds up to 0 modulo 2^64 about never.
    """
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        return [*_bits(tensor.indices()), *_bits(tensor.values())]
    flat = tensor.reshape(-1)
    # Complex dtypes have no integer view.
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    flat = flat.view(_INTEGERS[size])  # NaN is not equal to itself
    if len(flat) <= SMALL:
        return [flat.clone()]
    # int64 words need an address that is a multiple of 8.
    if flat.storage_offset() * size % 8:  # of a view: its words are not aligned
        return [flat.sum(dtype=torch.int64)]
    # The last bytes that fill no word are kept as they are.
    rest = len(flat) % (8 // size)
    return [flat[: len(flat) - rest].view(torch.int64).sum(), flat[len(flat) - rest :].clone()]
