"""Gradient sum in ``.grad``, the ordinary kind.

Autograd itself adds each micro-batch to ``.grad``. The versions of the gradients are recorded after each
backward of the window. If a version or a tensor has changed before the next one, other code has written to
the sum, and the window raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...devices import local_part
from ..sync.local import Local
from ..sync.sync import Sync
from .gradient_sum import (
    ManagedParameter,
    RunBackward,
    attach,
    clear,
    foreign_gradient,
    run_backward,
    unshare,
)


class ParameterGradientSum:
    """Sum in ``.grad`` by autograd itself, without more memory or work than plain PyTorch.

    Args:
        owned: the parameters.
        only_owned: restrict the backward to these parameters.
        whole: the loss is computed on the whole batch at once; `describe` then differs.
        run: runs the backward.
        sync: the ranks; sharded models keep sums outside of ``.grad``.

    Attributes:
        pending_factor: factor by which the sums must still be multiplied; saved with the window.
    """

    def __init__(
        self,
        owned: list[ManagedParameter],
        *,
        only_owned: bool,
        whole: bool = False,
        run: RunBackward = run_backward,
        sync: Sync | None = None,
    ) -> None:
        self._owned, self._run = owned, run
        self._sync = Local() if sync is None else sync
        self._whole = whole
        # A restricted backward leaves the gradients of other optimizers' parameters unchanged. It is used
        # only if there are such parameters, because reentrant checkpoints do not allow it.
        self.inputs = [entry.parameter for entry in owned] if only_owned else None
        self._factors: dict[tuple[Any, ...], Tensor] = {}
        self.pending_factor = 1.0
        self._versions = GradientVersions(owned)

    def begin(self) -> None:
        """Clear all gradients."""
        clear(self._owned)
        self._factors.clear()
        self.pending_factor = 1.0
        self._versions.clear()

    def backward(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters``."""
        # Before the backward, because afterwards a change by other code could not be distinguished.
        self._versions.require_unchanged()
        # Divided now, because the sums are multiplied by `pending_factor` at the end.
        factor = factor / self.pending_factor
        # As the gradient of the loss, the factor costs no multiplication in the graph. Its tensor is reused:
        # a window has one or two factors, because only the last micro-batch may be smaller.
        key = (factor, loss.dtype, loss.device, loss.shape)
        gradient = self._factors.get(key)
        if gradient is None:
            gradient = self._factors[key] = loss.new_full(loss.shape, factor)
        self._run(loss, gradient, self.inputs, retain_graph=retain_graph)
        self.record(gradient)

    def backward_rounded(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters`` of a bfloat16 or float16 loss, without rounding the factor.

        The gradient of such a loss has the loss's dtype, in which a factor such as 1/3 has an error of 0.2 %.
        So the factor is split into a power of two, which the backward gets, and a rest between 1/2 and 1. The
        rest is kept in `pending_factor`. The sums are multiplied by it at the end, or before a micro-batch
        whose factor has another rest.
        """
        rest, exponent = math.frexp(factor)
        self._versions.require_unchanged()
        if rest != self.pending_factor:
            present = [gradient for gradient in self._versions.gradients if gradient is not None]
            for gradient in present:
                # In place, because .grad may be a view of a flat buffer.
                gradient.mul_(self.pending_factor / rest)
            # FSDP2 keeps unreduced gradients beside the shards, which need the same factor.
            self._sync.scale(self.pending_factor / rest)
            self.pending_factor = rest
            if present:
                self._versions.record()
        self.backward(loss, math.ldexp(rest, exponent), retain_graph=retain_graph)

    def record(self, loss_gradient: Tensor | None = None) -> None:
        """Record the present gradients as the window's own, after a backward.

        Args:
            loss_gradient: the gradient of the loss that the backward got; no sum may share its memory.
        """
        if not self._versions.record():
            return
        # A clone is another tensor, so its version is recorded again.
        if unshare(self._versions.parameters, loss_gradient):
            self._versions.clear_recorded()
            self._versions.record()

    def savepoint(self) -> None:
        """Make the present sums the ones that `rollback` returns to, without a copy."""
        self._versions.savepoint()

    def rollback(self) -> bool:
        """Restore the sums of the savepoint; return False if that is impossible, and the window restarts."""
        return self._versions.rollback()

    def sums(self) -> list[Tensor | None]:
        """Return the sums so far, one per owned parameter."""
        return self._versions.gradients

    def close(self) -> list[Tensor | None]:
        """Return the sums, one per owned parameter, and remove them from this object."""
        self._versions.require_unchanged()
        gradients = self._versions.gradients
        if self.pending_factor != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(self.pending_factor)
            self._sync.scale(self.pending_factor)
            self.pending_factor = 1.0
        self._versions.clear()
        return gradients

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        return torch.zeros_like(self._owned[index].parameter, requires_grad=False)

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Make the normalised gradients the ``.grad`` that the optimizer reads."""
        attach(self._owned, gradients)

    def restore(self) -> None:
        """Clear all gradients."""
        self._versions.clear()
        clear(self._owned)

    def restart(self) -> None:
        """Call `restore`, then `begin`."""
        self.restore()
        self.begin()

    def commit(self) -> None:
        """No-op: the update rule frees the gradients."""

    def describe(self) -> str:
        """Return the kind and dtype of the sum; a saved window resumes only into an equal one."""
        return ".grad of the whole batch" if self._whole else ".grad"

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        # FSDP2 reduces first, so that gradients beside the shards are in the saved sums.
        self._sync.flush()
        self._versions.record()
        gradients = {
            entry.name: local_part(entry.parameter.grad).clone()
            for entry in self._owned
            if entry.parameter.grad is not None
        }
        return {"gradients": gradients, "held": list(gradients), "pending_factor": self.pending_factor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved sums."""
        self.pending_factor = state.get("pending_factor", 1.0)
        for entry in self._owned:
            gradient = state["gradients"].get(entry.name)
            if gradient is None:
                entry.parameter.grad = None
            # An ordinary parameter; the saved sum of a DTensor is this rank's shard.
            elif local_part(entry.parameter) is entry.parameter:
                entry.parameter.grad = gradient.to(entry.parameter.device, copy=True)
            else:
                entry.parameter.grad = torch.zeros_like(entry.parameter, requires_grad=False)
                local_part(entry.parameter.grad).copy_(gradient)
        self._versions.clear_recorded()
        self._versions.record()


class GradientVersions:
    """Gradients of parameters and their versions after the window's last backward.

    Args:
        owned: the parameters.

    Attributes:
        parameters: the parameters, in the order of `owned`.
    """

    def __init__(self, owned: list[ManagedParameter]) -> None:
        self.parameters = [entry.parameter for entry in owned]
        self._owned = owned
        # One list for all windows, never changed, because a new list for each takes measurable time.
        self._none: list[Any] = [None] * len(owned)
        self._gradients: list[Tensor | None] = self._none
        self._versions: list[int | None] = self._none
        self._saved = (self._gradients, self._versions)

    def record(self) -> bool:
        """Record the present gradients after a backward; return whether a parameter got its first one."""
        before = self._versions
        self._gradients, self._versions = [], []
        for parameter in self.parameters:
            gradient = parameter.grad
            # Held here, so that no other tensor can reuse its id.
            self._gradients.append(gradient)
            self._versions.append(None if gradient is None else gradient._version)
        # By count(), which is fast, because this runs after every backward.
        return None in before and before.count(None) > self._versions.count(None)

    def savepoint(self) -> None:
        """Make the gradients recorded last the ones that `rollback` returns to."""
        self._saved = (self._gradients, self._versions)

    def rollback(self) -> bool:
        """Restore the gradients of the savepoint; return False if one was written since the savepoint.

        Gradients recorded after the savepoint are ignored, because memory may run out after a backward.
        """
        gradients, versions = self._saved
        # Every in-place addition increases the version.
        if _versions(gradients) != versions:
            return False
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._gradients, self._versions = gradients, versions
        return True

    @property
    def gradients(self) -> list[Tensor | None]:
        """The recorded gradients, one for each parameter."""
        return self._gradients

    def require_unchanged(self) -> None:
        """Raise `WindowError` if another backward or zero_grad() has changed a gradient since `record`."""
        recorded = zip(self.parameters, self._gradients, self._versions, strict=True)
        for index, (parameter, gradient, version) in enumerate(recorded):
            now = parameter.grad
            # Identity finds zero_grad(set_to_none=True), the version finds zero_grad(set_to_none=False).
            if now is not gradient or (now is not None and now._version != version):
                raise foreign_gradient(self._owned[index].name)

    def clear(self) -> None:
        """Remove all recorded gradients, including those of the savepoint."""
        self._gradients, self._versions = self._none, self._none
        self._saved = (self._none, self._none)

    def clear_recorded(self) -> None:
        """Remove the recorded gradients, but not those of the savepoint."""
        self._gradients, self._versions = self._none, self._none


def _versions(gradients: list[Tensor | None]) -> list[int | None]:
    """Return the number of in-place writes of each gradient; None for a missing one."""
    return [None if gradient is None else gradient._version for gradient in gradients]
