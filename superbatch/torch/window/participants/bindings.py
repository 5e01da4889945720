"""Functions to compare, copy and hold the values of attributes and other bindings during a window."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .kept_tensors import SMALL_BYTES, is_array
from .reached import LONGEST

# Sentinels, because a user may bind None, False or NaN.
NOTHING: Any = object()  # the name is not bound
UNHELD: Any = object()  # stands for a result of a forward, whose memory must not be kept
SCALARS = (bool, int, float, complex, str, bytes, type(None))


def value_or_unheld(value: Any, *, first: bool) -> Any:
    """Return the value of a binding if it may be held during a window; `UNHELD` for results of a forward.

    Args:
        value: the bound value.
        first: whether it existed before the first window: then it is no result of a forward, even if large.

    Examples:
        >>> result = torch.ones(1, requires_grad=True) * 2
        >>> value_or_unheld(3, first=False), value_or_unheld(result, first=True) is UNHELD
        (3, True)
    """
    if isinstance(value, Tensor):
        # A tensor with a grad_fn holds the graph of a forward; a large new tensor is probably an activation.
        result = value.grad_fn is not None or not (first or value.nbytes <= SMALL_BYTES)
        return UNHELD if result else value
    if isinstance(value, list | tuple | dict | set) or type(value).__name__ == "deque":
        if len(value) > LONGEST:
            return UNHELD
        # A container is a result if one of its items is, e.g. `self.features = [layer1, layer2]`.
        items = value.values() if isinstance(value, dict) else value
        return UNHELD if any(value_or_unheld(item, first=first) is UNHELD for item in items) else value
    if is_array(value):
        return value if first or value.nbytes <= SMALL_BYTES else UNHELD
    if isinstance(value, (*SCALARS, nn.Module)) or callable(value) or first or value is NOTHING:
        return value
    return UNHELD


def differs(a: Any, b: Any) -> bool:
    """Return whether two bound values differ: they are different objects, and not equal numbers or strings.

    Examples:
        >>> differs((1, 2.5), (1, 2.5)), differs(torch.ones(1), torch.ones(1))
        (False, True)
    """
    if a is b:
        return False
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return any(map(differs, a, b))
    # Equal numbers may be different objects: `self.count = 3 + 0.5` makes a new 3.5.
    if type(a) is type(b) and isinstance(a, SCALARS):
        return bool(a != b and (a == a or b == b))  # from NaN to NaN is no change
    return True


def equal(a: Any, b: Any) -> bool:
    """Return whether two values have equal content; NaN counts as equal to NaN.

    Examples:
        >>> equal((1, torch.ones(1)), (1, torch.ones(1)))
        True
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # nan_to_num, because torch.equal returns False for two NaNs.
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    return not differs(a, b)


def copied(value: Any) -> Any:
    """Return a copy of a tensor, list or tuple, and any other object itself.

    Examples:
        >>> copied([torch.ones(1), 2])
        (tensor([1.]), 2)
    """
    if isinstance(value, Tensor):
        # Detached, because a clone would keep the graph of the forward until the window ends.
        return value.detach().clone()
    return tuple(map(copied, value)) if isinstance(value, tuple | list) else value


def is_plain(value: Any) -> bool:
    """Return whether a value consists of tensors, numbers and strings only.

    Examples:
        >>> is_plain((1, "a")), is_plain(nn.Identity())
        (True, False)
    """
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (*SCALARS, Tensor))


def has_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or NumPy array, or a tuple that contains one.

    Examples:
        >>> has_tensor((1, torch.ones(1)))
        True
    """
    if isinstance(value, tuple):
        return any(map(has_tensor, value))
    return isinstance(value, Tensor) or is_array(value)


def is_content(value: Any) -> bool:
    """Return whether a value is more than a count: a tensor, a module, or a float such as a running mean.

    Examples:
        >>> is_content(0.5), is_content(3), is_content((1, 0.5))
        (True, False, True)
    """
    if isinstance(value, tuple | list | deque):
        return any(map(is_content, value))
    return isinstance(value, float | nn.Module) or has_tensor(value)


def is_log(before: Any, now: Any) -> bool:
    """Return whether a value is a list without tensors that has become longer or shorter.

    Examples:
        >>> is_log((0.5,), (0.5, 0.25)), is_log((0.5,), (0.25,))
        (True, False)
    """
    lists = tuple | list | deque
    # A growing list of losses is a log. A list with tensors may be a memory bank, which is state.
    if not (isinstance(before, lists) and isinstance(now, lists)) or len(before) == len(now):
        return False
    return not any(map(has_tensor, (*before, *now)))


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and NumPy arrays of a bound value: itself, or the entries of a list.

    Examples:
        >>> list(tensors_of("banks", (torch.ones(1),)))
        [('banks[0]', tensor([1.]))]
    """
    if isinstance(value, Tensor) or is_array(value):
        yield name, value
    elif isinstance(value, tuple):
        # One level only: `Table.read` returns a list as a tuple, and nested lists are tables of their own.
        for index, item in enumerate(value):
            if isinstance(item, Tensor) or is_array(item):
                yield f"{name}[{index}]", item
