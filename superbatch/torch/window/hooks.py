"""Hooks of an optimizer before its step, and a call behind the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch

_HOOKS = "_optimizer_step_pre_hooks"


def after_hooks(optimizer: torch.optim.Optimizer, call: Callable[..., None]) -> Callable[[], None]:
    """Let a call follow the hooks before each step of an optimizer.

    Args:
        optimizer: with hooks of its own; they may remove themselves while they run.
        call: takes what a hook takes.

    Returns:
        What ends that.

    Examples:
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> once = sgd.register_step_pre_hook(lambda *_: once.remove())
        >>> end = after_hooks(sgd, lambda *_: print("behind them"))
        >>> sgd.step()
        behind them
        >>> end()
    """
    # No hook of ours: torch iterates over the very dictionary, and a last hook that removes itself is allowed
    # only while none follows it.
    own = vars(optimizer)[_HOOKS]
    vars(optimizer)[_HOOKS] = _Followed(own, call)
    return partial(vars(optimizer).__setitem__, _HOOKS, own)


class _Followed:
    """Dictionary of hooks, as far as torch uses one."""

    def __init__(self, hooks: MutableMapping[int, Any], call: Callable[..., None]) -> None:
        self._hooks, self._call = hooks, call

    def values(self) -> Iterator[Any]:
        """Yield the hooks, then the call."""
        yield from self._hooks.values()
        yield self._call

    def __setitem__(self, number: int, hook: Any) -> None:
        self._hooks[number] = hook
