"""Participant for gradients that were in ``.grad`` before a window that leaves its own there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

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
            # Set to None so that the window's first gradient starts its own tensor.
            parameter.grad = None

    def savepoint(self) -> None:
        """No-op: they do not change in a window."""

    def rollback(self) -> bool:
        """No-op: they do not change in a window."""
        return True

    def restart(self) -> None:
        """No-op: they do not change in a window."""

    def restore(self) -> None:
        """Restore the gradients in ``.grad``."""
        for parameter, gradient in self._earlier:
            parameter.grad = gradient

    def forget(self) -> None:
        """Keep no gradient alive once the window is over."""
        self._earlier, self._sums = [], {}

    @torch.no_grad()
    def prepare(self, gradients: Sequence[Tensor | None]) -> None:
        """Make the sums that need memory: those that cannot be made in place.

        Args:
            gradients: of the window, one for each owned parameter.
        """
        # By id: `==` on tensors compares their elements.
        ours = {id(entry.parameter): each for entry, each in zip(self._owned, gradients, strict=True)}
        for parameter, earlier in self._earlier:
            gradient = ours.get(id(parameter))
            if gradient is not None and not _can_hold(earlier, gradient):
                gradient = gradient.to(parameter.dtype)
                # torch has add(dense, sparse), but not add(sparse, dense).
                first, second = (gradient, earlier) if earlier.is_sparse else (earlier, gradient)
                self._sums[id(parameter)] = first + second

    @torch.no_grad()
    def commit(self) -> None:
        """Add the gradient of the window to the earlier one, in place where that is possible."""
        with ExitStack() as stack:  # an error at one leaves the others whole
            for entry in list(self._earlier):
                stack.callback(self._add, *entry)

    def _add(self, parameter: Tensor, earlier: Tensor) -> None:
        if id(parameter) in self._sums:
            parameter.grad = self._sums[id(parameter)]
        elif parameter.grad is None:
            parameter.grad = earlier
        elif parameter.grad is not earlier:  # else it was added, by a commit before this one
            # In place: this takes no memory. On one line: no error of ours comes between the two.
            parameter.grad = earlier.add_(parameter.grad)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: gradients in ``.grad`` are the program's to save."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: nothing was saved."""


def _can_hold(earlier: Tensor, gradient: Tensor) -> bool:
    """Return whether the sum of two gradients can be written into the earlier one."""
    if earlier.is_sparse or gradient.is_sparse or earlier.is_inference():
        return False
    expanded = zip(earlier.shape, earlier.stride(), strict=True)
    # An expanded gradient (stride 0) has one memory cell for several elements: add_ on it raises.
    return not any(length > 1 and stride == 0 for length, stride in expanded)
