"""Call of a function after the last of an optimizer's step pre-hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch

_HOOKS = "_optimizer_step_pre_hooks"


def after_hooks(optimizer: torch.optim.Optimizer, call: Callable[..., None]) -> Callable[[], None]:
    """Run a function after the step pre-hooks of an optimizer, before each of its steps.

    Args:
        optimizer: may have hooks of its own, which may remove themselves while they run.
        call: the function, with the arguments of a hook.

    Returns:
        A function that removes the call.

    Examples:
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> once = sgd.register_step_pre_hook(lambda *_: once.remove())
        >>> end = after_hooks(sgd, lambda *_: print("after the hooks"))
        >>> sgd.step()
        after the hooks
        >>> end()
    """
    # Not another hook in the dictionary: torch iterates over it, and a hook that removes itself would raise
    # unless it is the last one.
    own = vars(optimizer)[_HOOKS]
    vars(optimizer)[_HOOKS] = _HooksThenCall(own, call)
    return partial(vars(optimizer).__setitem__, _HOOKS, own)


class _HooksThenCall:
    """Replacement for an optimizer's dictionary of hooks, with the methods that torch calls."""

    def __init__(self, hooks: MutableMapping[int, Any], call: Callable[..., None]) -> None:
        self._hooks, self._call = hooks, call

    def values(self) -> Iterator[Any]:
        yield from self._hooks.values()
        yield self._call

    def __setitem__(self, number: int, hook: Any) -> None:
        self._hooks[number] = hook
