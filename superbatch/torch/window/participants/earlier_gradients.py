"""Participant for gradients that were in ``.grad`` before a window of a `Gradient`.

The window adds its gradient to them, as ``loss.backward()`` would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .gradient_sum import ManagedParameter


class EarlierGradients:
    """Removes earlier gradients during a window, and adds the window's gradient to them at its end.

    They remain the same tensor objects, so a flat buffer that they are views of contains the sum too.

    Args:
        owned: parameters whose gradients the window sums; the list may change in place.
    """

    def __init__(self, owned: list[ManagedParameter]) -> None:
        self._owned = owned
        self._earlier: list[tuple[Tensor, Tensor]] = []
        self._sums: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Remove the gradients from ``.grad`` and keep them here."""
        self._sums.clear()
        parameters = [entry.parameter for entry in self._owned]
        self._earlier = [(each, each.grad) for each in parameters if each.grad is not None]
        for parameter, _ in self._earlier:
            # None, so that autograd makes a new tensor for the window's gradient.
            parameter.grad = None

    def savepoint(self) -> None:
        """No-op: earlier gradients do not change in a window."""

    def rollback(self) -> bool:
        """No-op: earlier gradients do not change in a window."""
        return True

    def restart(self) -> None:
        """No-op: earlier gradients do not change in a window."""

    def restore(self) -> None:
        """Restore the gradients in ``.grad``."""
        for parameter, gradient in self._earlier:
            parameter.grad = gradient

    def free(self) -> None:
        """Free the references to gradients once the window is over."""
        self._earlier, self._sums = [], {}

    @torch.no_grad()
    def prepare(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute the sums that cannot be made in place, because they need memory.

        Args:
            gradients: gradients of the window, one for each owned parameter.
        """
        # By id, because `==` on tensors compares elements.
        new = {id(entry.parameter): each for entry, each in zip(self._owned, gradients, strict=True)}
        for parameter, earlier in self._earlier:
            gradient = new.get(id(parameter))
            if gradient is not None and not _can_hold(earlier, gradient):
                gradient = gradient.to(parameter.dtype)
                # torch has add(dense, sparse), but not add(sparse, dense).
                first, second = (gradient, earlier) if earlier.is_sparse else (earlier, gradient)
                self._sums[id(parameter)] = first + second

    @torch.no_grad()
    def commit(self) -> None:
        """Add the gradients of the window to the earlier ones, in place if possible."""
        with ExitStack() as stack:  # runs all callbacks even if one raises
            for entry in list(self._earlier):
                stack.callback(self._add, *entry)

    def _add(self, parameter: Tensor, earlier: Tensor) -> None:
        if id(parameter) in self._sums:
            parameter.grad = self._sums[id(parameter)]
        elif parameter.grad is None:
            parameter.grad = earlier
        elif parameter.grad is not earlier:  # otherwise an earlier call of commit has added it
            # In place, which takes no memory. One statement, so that no interrupt comes between.
            parameter.grad = earlier.add_(parameter.grad)

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the user's program saves its own gradients."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: there is no saved state."""


def _can_hold(earlier: Tensor, gradient: Tensor) -> bool:
    """Return whether the sum of two gradients can be written into the earlier one."""
    if earlier.is_sparse or gradient.is_sparse or earlier.is_inference():
        return False
    expanded = zip(earlier.shape, earlier.stride(), strict=True)
    # add_ on an expanded gradient (stride 0) raises, because several elements share their memory.
    return not any(length > 1 and stride == 0 for length, stride in expanded)
