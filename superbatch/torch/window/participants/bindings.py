"""Values that names are bound to: compared, copied, and held for the time of a window where they may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .kept_tensors import SMALL_BYTES, is_array
from .reached import LONGEST

# Sentinels, compared with `is`: None, False and NaN are values that a user binds.
NOTHING: Any = object()  # not bound
UNHELD: Any = object()  # a result of the last forward, which would keep memory alive
SCALARS = (bool, int, float, complex, str, bytes, type(None))


def held(value: Any, *, first: bool) -> Any:
    """Return the value of a binding if it may be held during a window; `UNHELD` for results of a forward.

    Args:
        value: what is bound.
        first: it was there before the first window, so that it is no result whatever its size.

    Examples:
        >>> held(3, first=False), held(torch.ones(1, requires_grad=True) * 2, first=True) is UNHELD
        (3, True)
    """
    if isinstance(value, Tensor):
        # A tensor with a grad_fn holds the graph of a forward; a large new one is probably its activations.
        result = value.grad_fn is not None or not (first or value.nbytes <= SMALL_BYTES)
        return UNHELD if result else value
    if isinstance(value, list | tuple | dict | set) or type(value).__name__ == "deque":
        if len(value) > LONGEST:
            return UNHELD
        # Containers are results if one of their items is, e.g. `self.features = [layer1, layer2]`.
        items = value.values() if isinstance(value, dict) else value
        return UNHELD if any(held(item, first=first) is UNHELD for item in items) else value
    if is_array(value):
        return value if first or value.nbytes <= SMALL_BYTES else UNHELD
    if isinstance(value, (*SCALARS, nn.Module)) or callable(value) or first or value is NOTHING:
        return value
    return UNHELD


def differs(a: Any, b: Any) -> bool:
    """Return whether a name is bound to something else: another object, unless it is an equal number or text.

    Examples:
        >>> differs((1, 2.5), (1, 2.5)), differs(torch.ones(1), torch.ones(1))
        (False, True)
    """
    if a is b:
        return False
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return any(map(differs, a, b))
    # Python makes a new object of an equal number: `self.count = 3 + 0.5` binds another 3.5.
    if type(a) is type(b) and isinstance(a, SCALARS):
        return bool(a != b and (a == a or b == b))  # NaN to NaN is no change
    return True


def equal(a: Any, b: Any) -> bool:
    """Return whether two contents are equal; a NaN is equal to a NaN.

    Examples:
        >>> equal((1, torch.ones(1)), (1, torch.ones(1)))
        True
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # torch.equal calls NaN different from NaN. Infinities become the largest number on both sides alike.
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    return not differs(a, b)


def copied(value: Any) -> Any:
    """Return a copy of plain content, and other objects as they are.

    Examples:
        >>> copied([torch.ones(1), 2])
        (tensor([1.]), 2)
    """
    if isinstance(value, Tensor):
        # detach: a clone would keep the graph of the forward alive until the window ends.
        return value.detach().clone()
    return tuple(map(copied, value)) if isinstance(value, tuple | list) else value


def is_plain(value: Any) -> bool:
    """Return whether it is made of tensors, numbers and texts alone.

    Examples:
        >>> is_plain((1, "a")), is_plain(nn.Identity())
        (True, False)
    """
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (*SCALARS, Tensor))


def has_tensor(value: Any) -> bool:
    """Return whether it is a tensor or NumPy array, or a tuple with one.

    Examples:
        >>> has_tensor((1, torch.ones(1)))
        True
    """
    if isinstance(value, tuple):
        return any(map(has_tensor, value))
    return isinstance(value, Tensor) or is_array(value)


def is_content(value: Any) -> bool:
    """Return whether it holds content, not a count: a tensor, a module, or a float (a running mean).

    Examples:
        >>> is_content(0.5), is_content(3), is_content((1, 0.5))
        (True, False, True)
    """
    if isinstance(value, tuple | list | deque):
        return any(map(is_content, value))
    return isinstance(value, float | nn.Module) or has_tensor(value)


def is_log(before: Any, now: Any) -> bool:
    """Return whether it is a list without tensors that has grown or shrunk.

    Examples:
        >>> is_log((0.5,), (0.5, 0.25)), is_log((0.5,), (0.25,))
        (True, False)
    """
    lists = tuple | list | deque
    # A list of losses that grows is a log. A list with tensors may be a memory bank, which is state.
    if not (isinstance(before, lists) and isinstance(now, lists)) or len(before) == len(now):
        return False
    return not any(map(has_tensor, (*before, *now)))


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and NumPy arrays that a binding holds: one, or those of a list.

    Examples:
        >>> list(tensors_of("banks", (torch.ones(1),)))
        [('banks[0]', tensor([1.]))]
    """
    if isinstance(value, Tensor) or is_array(value):
        yield name, value
    elif isinstance(value, tuple):
        # One level: a list is read as a tuple of its entries (`Table.read`), and deeper ones are tables.
        for index, item in enumerate(value):
            if isinstance(item, Tensor) or is_array(item):
                yield f"{name}[{index}]", item
