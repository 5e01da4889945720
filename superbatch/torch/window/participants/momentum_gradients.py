"""Sum a window's gradient straight into the momentum buffer of SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .gradient_sum import (
    ManagedParameter,
    add_after_gradient,
    clear,
    remove,
    require_none,
    run_backward,
    take_gradient,
)


class MomentumGradientSum:
    """Sum straight into SGD's momentum buffer: no gradient buffer at all.

    With momentum ``mu``, weight decay ``d`` and the normalised gradient ``g``, SGD computes ``v = mu v + d p
    + g`` and ``p = p - lr v``; ``v`` is linear in ``g``, so the sum over micro-batches can be taken in it
    (exact). A copy of the buffer on the host restores it if the window fails.
    """

    def __init__(
        self, owned: list[ManagedParameter], optimizer: torch.optim.Optimizer, *, only_owned: bool = False
    ) -> None:
        self._owned = owned
        self.inputs = [entry.parameter for entry in owned] if only_owned else None
        # The live state: SGD.step would read the same buffers.
        self._state: dict[Any, dict[str, Any]] = optimizer.state
        self._before: dict[str, Tensor | None] = {}
        self._moved: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._factor = 1.0
        self._inside = False
        self._added = False  # since the savepoint

    def begin(self) -> None:
        """Start a window: no gradient of it exists yet."""
        # A gradient of an earlier loop would raise in `require_none` at the first backward.
        clear(self._owned)
        self._before.clear()
        self.savepoint()
        add_after_gradient(self._owned, self._add, self._hooks)

    def backward(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters``."""
        self._factor = factor
        require_none(self._owned)
        self._inside = True
        try:
            run_backward(loss, None, self.inputs, retain_graph=retain_graph)
        finally:
            self._inside = False

    def savepoint(self) -> None:
        """Remember the sums as those before a micro-batch; nothing is copied."""
        self._added = False

    def rollback(self) -> bool:
        """Restore the sums of the savepoint; False if that is impossible, and the window must restart."""
        # The buffer holds part of the micro-batch; the window must restore it from the host copy.
        if self._added:
            return False
        clear(self._owned)
        return True

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        remove(self._hooks)
        return [None] * len(self._owned)

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        raise NotImplementedError("momentum buffers are not summed over ranks")

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer: there are none."""

    def sums(self) -> list[Tensor | None]:
        """Return the momentum buffers that the window touched, in place of gradients."""
        return [
            self._state[entry.target]["momentum_buffer"] if entry.name in self._before else None
            for entry in self._owned
        ]

    def apply(self) -> None:
        """Move the parameters: ``p -= lr v`` for each that had a gradient; a second call continues."""
        touched = self._touched()
        with torch.no_grad():
            # One entry is added per moved parameter: after an interrupt, a second call skips those.
            while len(self._moved) < len(touched):
                entry = touched[len(self._moved)]
                buffer, rate = self._state[entry.target]["momentum_buffer"], float(entry.group["lr"])
                self._moved.append(entry.target.add_(buffer, alpha=-rate))

    def restore(self) -> None:
        # Hooks first: a late backward must not add to restored buffers.
        """Forget the window: everything is as before it."""
        remove(self._hooks)
        with torch.no_grad():
            for entry in self._touched():
                before = self._before[entry.name]
                if before is None:  # there may be no buffer yet: for lack of memory
                    # SGD makes a missing buffer itself: a zero buffer left here would change nothing, a
                    # partial sum would.
                    self._state.pop(entry.target, None)
                else:
                    self._state[entry.target]["momentum_buffer"].copy_(before)
        self._before.clear()
        clear(self._owned)

    def restart(self) -> None:
        """Restore, and begin again."""
        self.restore()
        self.begin()

    def commit(self) -> None:
        """Forget the copies; the update rule frees the gradients."""
        self._before.clear()
        self._moved.clear()

    def describe(self) -> str:
        """Return the kind and dtype of the sum: a window resumes only into the same."""
        return "momentum"

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        buffers = {e.name: self._state[e.target]["momentum_buffer"].clone() for e in self._touched()}
        gradients = {"momentum": buffers, "before": dict(self._before)}
        return {"gradients": gradients, "held": list(buffers), "yet": 1.0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved sums."""
        saved = state["gradients"]
        self._before = dict(saved["before"])
        for entry in self._touched():
            buffer = saved["momentum"][entry.name].to(entry.target.device, copy=True)
            self._state.setdefault(entry.target, {})["momentum_buffer"] = buffer

    def _touched(self) -> list[ManagedParameter]:
        return [entry for entry in self._owned if entry.name in self._before]

    def _add(self, entry: ManagedParameter) -> None:
        self._added = True  # first: the gradient is taken away before it is in the sum
        gradient = take_gradient(entry, inside=self._inside)
        if entry.name not in self._before:
            self._start(entry)
        # With maximize=True SGD negates the gradient before it enters the momentum.
        sign = -1.0 if entry.group["maximize"] else 1.0
        self._state[entry.target]["momentum_buffer"].add_(gradient, alpha=sign * self._factor)

    def _start(self, entry: ManagedParameter) -> None:
        """Make the buffer what SGD would have before the gradient is added: ``mu v + d p``."""
        group, target = entry.group, entry.target
        buffer = self._state.get(target, {}).get("momentum_buffer")
        # On the host: a copy on the device would cost what summing in the momentum saves.
        self._before[entry.name] = None if buffer is None else buffer.to("cpu", copy=True)
        if buffer is None:
            buffer = torch.zeros_like(target, memory_format=torch.preserve_format, requires_grad=False)
            # SGD's first step sets v = g + d p, which zeros plus the terms below give exactly.
            self._state.setdefault(target, {})["momentum_buffer"] = buffer
        else:
            buffer.mul_(group["momentum"])
        if group["weight_decay"]:
            buffer.add_(target.detach(), alpha=group["weight_decay"])
