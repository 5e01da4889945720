"""Participant for gradients that were in ``.grad`` before a window that leaves its own there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...memory.out_of_memory import out_of_memory, release_caches
from .gradient_sum import ManagedParameter


class EarlierGradients:
    """Keeps earlier gradients apart during a window, and adds that of the window to them at its end.

    They stay the same tensors: a view of them, such as a flat buffer, holds the sum as well.

    Args:
        owned: parameters whose gradients the window sums; may change in place.
    """

    def __init__(self, owned: list[ManagedParameter]) -> None:
        self._owned = owned
        self._earlier: list[tuple[Tensor, Tensor]] = []
        self._sums: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Take the gradients out of ``.grad``."""
        self._sums.clear()
        parameters = [entry.parameter for entry in self._owned]
        self._earlier = [(each, each.grad) for each in parameters if each.grad is not None]
        for parameter, _ in self._earlier:
            parameter.grad = None

    def savepoint(self) -> None:
        """No-op: they do not change in a window."""

    def rollback(self) -> bool:
        """No-op: they do not change in a window."""
        return True

    def restart(self) -> None:
        """No-op: they do not change in a window."""

    def restore(self) -> None:
        """Put the gradients back into ``.grad``."""
        for parameter, gradient in self._earlier:
            parameter.grad = gradient

    @torch.no_grad()
    def prepare(self) -> None:
        """Make the sums that need memory: those with a sparse gradient."""
        for parameter, earlier in self._earlier:
            if parameter.grad is not None and (earlier.is_sparse or parameter.grad.is_sparse):
                dense_first = (parameter.grad, earlier) if earlier.is_sparse else (earlier, parameter.grad)
                self._sums[id(parameter)] = dense_first[0] + dense_first[1]

    @torch.no_grad()
    def commit(self) -> None:
        """Add the gradient of the window to the earlier one, in place where both are dense."""
        while self._earlier:
            parameter, earlier = self._earlier[-1]
            if id(parameter) in self._sums:
                parameter.grad = self._sums[id(parameter)]
            elif parameter.grad is not None:  # in place: this takes no memory
                _take_twice(partial(earlier.add_, parameter.grad))
                parameter.grad = earlier
            else:
                parameter.grad = earlier
            self._earlier.pop()  # so that a second commit adds nothing twice
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: gradients in ``.grad`` are the program's to save."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: nothing was saved."""


def _take_twice(step: Callable[[], object]) -> None:
    """Take a step, and once more if memory ran out the first time."""
    try:
        step()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        release_caches()
        step()
