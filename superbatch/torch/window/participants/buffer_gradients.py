"""Gradient sum in buffers: in a wider dtype, or with a check of each micro-batch first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superbatch.torch import fastpaths

from .gradient_sum import (
    LOW_PRECISION,
    ManagedParameter,
    RunBackward,
    add_after_gradient,
    all_finite,
    attach,
    clear,
    remove,
    require_none,
    run_backward,
    take_gradient,
)


class BufferGradientSum:
    """Sum in buffers of a wide dtype; the gradient of each micro-batch is freed as soon as it is added.

    With `isolated=True` a micro-batch's gradient stays in ``.grad`` until `keep` or `drop` is called.

    Args:
        owned: the parameters.
        dtype: dtype of the sums of bfloat16 and float16 gradients; other sums have the parameter's dtype.
        isolated: check each micro-batch's gradient as a whole before adding it.
        only_owned: restrict the backward to these parameters.
        run: runs the backward.
    """

    def __init__(
        self,
        owned: list[ManagedParameter],
        dtype: torch.dtype | None,
        *,
        isolated: bool = False,
        only_owned: bool = False,
        run: RunBackward = run_backward,
    ) -> None:
        self._owned, self._run = owned, run
        self._dtype = dtype
        self._isolated = isolated
        self.inputs = [entry.parameter for entry in owned] if only_owned else None
        self._buffers: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._factor = 1.0
        # True while the window's own backward runs; hooks called outside of it raise.
        self._inside = False
        self._added = False  # since the savepoint

    def begin(self) -> None:
        """Clear all gradients and sums."""
        # Otherwise a gradient of an earlier loop would raise in `require_none` at the first backward.
        clear(self._owned)
        self._buffers.clear()
        self.savepoint()
        # Isolated gradients need no hooks, because `keep` adds them after they were checked.
        if not self._isolated:
            add_after_gradient(self._owned, self._add, self._hooks)

    def backward(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters``."""
        self._factor = factor
        require_none(self._owned)
        self._inside = True
        try:
            self._run(loss, None, self.inputs, retain_graph=retain_graph)
        finally:
            self._inside = False

    def isolated_is_finite(self, others: Sequence[Tensor] = ()) -> bool:
        """Return whether the isolated gradient of the last micro-batch and all of `others` are finite."""
        gradients = [entry.parameter.grad for entry in self._owned if entry.parameter.grad is not None]
        return all_finite([*others, *gradients])

    def keep(self) -> None:
        """Add the isolated gradient of the last micro-batch to the sum."""
        self._inside = True
        entries = [entry for entry in self._owned if entry.parameter.grad is not None]
        sums = [self._buffers.get(entry.name) for entry in entries]
        # The fused addition needs a dense sum for each gradient, which exists after the first micro-batch.
        if any(one is None or one.is_sparse for one in sums):
            for entry in entries:
                self._add(entry)
        else:
            self._add_all(entries, [one for one in sums if one is not None])
        self._inside = False

    def drop(self) -> None:
        """Free the isolated gradient of the last micro-batch."""
        for entry in self._owned:
            entry.parameter.grad = None

    def savepoint(self) -> None:
        """Make the present sums the ones that `rollback` returns to, without a copy."""
        self._added = False

    def rollback(self) -> bool:
        """Restore the sums of the savepoint; return False if a gradient was added: the window restarts."""
        # A gradient that was added cannot be subtracted without rounding.
        if self._added:
            return False
        clear(self._owned)
        return True

    def sums(self) -> list[Tensor | None]:
        """Return the sums so far, one per owned parameter."""
        return [self._buffers.get(entry.name) for entry in self._owned]

    def close(self) -> list[Tensor | None]:
        """Return the sums, one per owned parameter, and remove them from this object."""
        remove(self._hooks)
        require_none(self._owned)
        return [self._buffers.pop(entry.name, None) for entry in self._owned]

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        parameter = self._owned[index].parameter
        # requires_grad=False, because zeros_like of a Parameter subclass may otherwise require a gradient.
        return torch.zeros_like(parameter, dtype=self._sum_dtype(parameter), requires_grad=False)

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Make the normalised gradients the ``.grad`` that the optimizer reads."""
        attach(self._owned, gradients)

    def restore(self) -> None:
        """Clear all gradients and sums, and remove the hooks."""
        remove(self._hooks)
        self._buffers.clear()
        clear(self._owned)

    def restart(self) -> None:
        """Call `restore`, then `begin`."""
        self.restore()
        self.begin()

    def commit(self) -> None:
        """No-op: the update rule frees the gradients."""

    def describe(self) -> str:
        """Return the kind and dtype of the sum; a saved window resumes only into an equal one."""
        return f"buffers of {self._dtype}"

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        # Cloned, because the window may continue after it was saved.
        gradients = {name: buffer.clone() for name, buffer in self._buffers.items()}
        return {"gradients": gradients, "held": list(gradients), "pending_factor": 1.0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved sums."""
        devices = {entry.name: entry.parameter.device for entry in self._owned}
        saved = state["gradients"]
        # To the parameter's device, because the saved window may have run on another one.
        self._buffers = {name: buffer.to(devices[name], copy=True) for name, buffer in saved.items()}

    def _add_all(self, entries: list[ManagedParameter], sums: list[Tensor]) -> None:
        self._added = True  # first, as in `_add`
        gradients = [take_gradient(entry, inside=self._inside) for entry in entries]
        if any(gradient.is_sparse for gradient in gradients):
            fastpaths.plain_add(sums, gradients, self._factor)  # `add` does not support sparse tensors
        else:
            fastpaths.add(sums, gradients, self._factor)

    def _add(self, entry: ManagedParameter) -> None:
        self._added = True  # first, because the gradient leaves .grad before it is in the sum
        gradient = take_gradient(entry, inside=self._inside)
        buffer = self._buffers.get(entry.name)
        if buffer is None:
            # A new tensor, because autograd may have given two parameters the same gradient.
            self._buffers[entry.name] = gradient.to(self._sum_dtype(gradient)) * self._factor
        else:
            buffer.add_(gradient, alpha=self._factor)

    def _sum_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.dtype in LOW_PRECISION else tensor.dtype
