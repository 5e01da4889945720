"""The ordinary place to sum a window's gradient: ``.grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .gradients import Owned, are_apart, attach, clear, run_backward, unshare
from .marks import Marks, Settling


class InGrad:
    """Sum in ``.grad`` by autograd itself: no memory and no pass beyond plain PyTorch's."""

    def __init__(
        self,
        owned: list[Owned],
        *,
        only_owned: bool,
        whole: bool = False,
        settling: Settling | None = None,
    ) -> None:
        self._owned = owned
        self._whole = whole
        # Restricting a backward to some leaves keeps the gradients of other optimizers' parameters as they
        # are,
        # but reentrant checkpoints refuse it: so only where there are other parameters.
        self.inputs = [entry.parameter for entry in owned] if only_owned else None
        self._factors: dict[tuple[Any, ...], Tensor] = {}
        self._marks = Marks(owned, settling or Settling())

    def open(self) -> None:
        """Start a window: no gradient of it exists yet."""
        clear(self._owned)
        self._factors.clear()
        self._marks.forget()

    def backward(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters``."""
        self._marks.require()
        # Passed as the gradient of the loss, the factor costs no multiplication in the graph.
        key = (factor, loss.dtype, loss.device, loss.shape)
        gradient = self._factors.get(key)
        if gradient is None:
            gradient = self._factors[key] = loss.new_full(loss.shape, factor)
        run_backward(loss, gradient, self.inputs, retain_graph=retain_graph)
        self.took(gradient)

    def took(self, of_loss: Tensor | None = None) -> None:
        """Take the gradients that are in ``.grad`` now as the window's own, apart from that of the loss."""
        if self._marks.set() and not are_apart([*self._marks.gradients, of_loss]):
            unshare((entry.parameter for entry in self._owned), of_loss)
            self._marks.forget()
            self._marks.set()

    def undo(self) -> bool:
        """Put the sums back as before the last backward, which broke; whether that was possible."""
        return self._marks.put_back()

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        self._marks.require(last=True)
        gradients = self._marks.gradients
        self._marks.forget()
        return gradients

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        return torch.zeros_like(self._owned[index].parameter, requires_grad=False)

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer."""
        attach(self._owned, gradients)

    def discard(self) -> None:
        """Forget the window: everything is as before it."""
        self._marks.forget()
        clear(self._owned)

    def describe(self) -> str:
        """Say where and in what the sum is made, to go on with it only in the like."""
        return ".grad of the whole batch" if self._whole else ".grad"

    def state(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {
            entry.name: entry.parameter.grad.clone()
            for entry in self._owned
            if entry.parameter.grad is not None
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from saved sums."""
        for entry in self._owned:
            gradient = state.get(entry.name)
            entry.parameter.grad = (
                None if gradient is None else gradient.to(entry.parameter.device, copy=True)
            )
        self._marks.forget()
        self._marks.set()
