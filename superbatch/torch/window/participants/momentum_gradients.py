"""Gradient sum in the momentum buffer of SGD."""

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
    """Sum in SGD's momentum buffer, without a buffer for gradients.

    With momentum ``mu``, weight decay ``d`` and the normalised gradient ``g``, SGD computes ``v = mu v + d p
    + g`` and ``p = p - lr v``. ``v`` is linear in ``g``, so adding micro-batches to ``v`` is exact. If the
    window fails, the buffer is restored from a copy on the host.

    Args:
        owned: the parameters.
        optimizer: the SGD that updates them.
        only_owned: restrict the backward to these parameters.
    """

    def __init__(
        self, owned: list[ManagedParameter], optimizer: torch.optim.Optimizer, *, only_owned: bool = False
    ) -> None:
        self._owned = owned
        self.inputs = [entry.parameter for entry in owned] if only_owned else None
        # The optimizer's own state, whose buffers SGD.step reads too.
        self._state: dict[Any, dict[str, Any]] = optimizer.state
        # By parameter name: the buffer before the window, on the host; None: there was no buffer.
        self._before: dict[str, Tensor | None] = {}
        self._updated: list[Tensor] = []  # parameters that `apply` has updated
        self._hooks: list[RemovableHandle] = []
        self._factor = 1.0
        self._inside = False
        self._added = False  # since the savepoint

    def begin(self) -> None:
        """Clear all gradients and copies."""
        # Otherwise a gradient of an earlier loop would raise in `require_none` at the first backward.
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
        """Make the present sums the ones that `rollback` returns to, without a copy."""
        self._added = False

    def rollback(self) -> bool:
        """Restore the sums of the savepoint; return False if a gradient was added: the window restarts."""
        # An added gradient cannot be removed from the buffer without rounding.
        if self._added:
            return False
        clear(self._owned)
        return True

    def close(self) -> list[Tensor | None]:
        """Return None for each owned parameter, because the momentum buffers are the sums."""
        remove(self._hooks)
        return [None] * len(self._owned)

    def zeros(self, index: int) -> Tensor:
        """Raise: momentum buffers are never summed over ranks."""
        raise NotImplementedError("momentum buffers are not summed over ranks")

    def attach(self, gradients: list[Tensor | None]) -> None:
        """No-op: there are no gradients."""

    def sums(self) -> list[Tensor | None]:
        """Return the momentum buffers that the window has changed, in place of gradients."""
        return [
            self._state[entry.target]["momentum_buffer"] if entry.name in self._before else None
            for entry in self._owned
        ]

    def apply(self) -> None:
        """Update each parameter that had a gradient, ``p -= lr v``; a second call continues the first."""
        entries = self._with_sum()
        with torch.no_grad():
            # A second call, after an interrupt, skips the parameters in `_updated`.
            while len(self._updated) < len(entries):
                entry = entries[len(self._updated)]
                buffer, rate = self._state[entry.target]["momentum_buffer"], float(entry.group["lr"])
                self._updated.append(entry.target.add_(buffer, alpha=-rate))

    def restore(self) -> None:
        """Restore the momentum buffers, clear all gradients, and remove the hooks."""
        # Hooks first, so that a later backward does not add to restored buffers.
        remove(self._hooks)
        with torch.no_grad():
            for entry in self._with_sum():
                before = self._before[entry.name]
                if before is None:  # pop's default, because making the buffer may have run out of memory
                    self._state.pop(entry.target, None)
                else:
                    self._state[entry.target]["momentum_buffer"].copy_(before)
        self._before.clear()
        clear(self._owned)

    def restart(self) -> None:
        """Call `restore`, then `begin`."""
        self.restore()
        self.begin()

    def commit(self) -> None:
        """Free the copies."""
        self._before.clear()
        self._updated.clear()

    def describe(self) -> str:
        """Return the kind of the sum; a saved window resumes only into an equal one."""
        return "momentum"

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        buffers = {e.name: self._state[e.target]["momentum_buffer"].clone() for e in self._with_sum()}
        gradients = {"momentum": buffers, "before": dict(self._before)}
        return {"gradients": gradients, "held": list(buffers), "pending_factor": 1.0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved sums."""
        saved = state["gradients"]
        self._before = dict(saved["before"])
        for entry in self._with_sum():
            buffer = saved["momentum"][entry.name].to(entry.target.device, copy=True)
            self._state.setdefault(entry.target, {})["momentum_buffer"] = buffer

    def _with_sum(self) -> list[ManagedParameter]:
        """Return the parameters whose momentum buffer contains a sum of this window."""
        return [entry for entry in self._owned if entry.name in self._before]

    def _add(self, entry: ManagedParameter) -> None:
        self._added = True  # first, because the gradient leaves .grad before it is in the sum
        gradient = take_gradient(entry, inside=self._inside)
        if entry.name not in self._before:
            self._start(entry)
        # With maximize=True SGD negates the gradient first.
        sign = -1.0 if entry.group["maximize"] else 1.0
        self._state[entry.target]["momentum_buffer"].add_(gradient, alpha=sign * self._factor)

    def _start(self, entry: ManagedParameter) -> None:
        """Set the buffer to ``mu v + d p``, to which gradients are then added."""
        group, target = entry.group, entry.target
        buffer = self._state.get(target, {}).get("momentum_buffer")
        # On the host, because a copy on the device would take the memory that this sum saves.
        self._before[entry.name] = None if buffer is None else buffer.to("cpu", copy=True)
        if buffer is None:
            buffer = torch.zeros_like(target, memory_format=torch.preserve_format, requires_grad=False)
            # SGD's first step sets v = g + d p, which is zero plus the terms below.
            self._state.setdefault(target, {})["momentum_buffer"] = buffer
        else:
            buffer.mul_(group["momentum"])
        if group["weight_decay"]:
            buffer.add_(target.detach(), alpha=group["weight_decay"])
