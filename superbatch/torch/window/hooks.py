"""A call after the last of an optimizer's step pre-hooks."""

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
        A function that ends this.

    Examples:
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> once = sgd.register_step_pre_hook(lambda *_: once.remove())
        >>> end = after_hooks(sgd, lambda *_: print("behind them"))
        >>> sgd.step()
        behind them
        >>> end()
    """
    # Not a hook of our own: torch iterates over the dictionary itself, where a hook may remove itself only if
    # it is the last.
    own = vars(optimizer)[_HOOKS]
    vars(optimizer)[_HOOKS] = _Followed(own, call)
    return partial(vars(optimizer).__setitem__, _HOOKS, own)


class _Followed:
    """The part of a dictionary of hooks that torch uses, with a call at its end."""

    def __init__(self, hooks: MutableMapping[int, Any], call: Callable[..., None]) -> None:
        self._hooks, self._call = hooks, call

    def values(self) -> Iterator[Any]:
        """Yield the hooks, then the call."""
        yield from self._hooks.values()
        yield self._call

    def __setitem__(self, number: int, hook: Any) -> None:
        self._hooks[number] = hook
