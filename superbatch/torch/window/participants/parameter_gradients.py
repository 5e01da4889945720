"""The ordinary place to sum a window's gradient: ``.grad``."""

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
    """Sum in ``.grad`` by autograd itself: no memory and no pass beyond plain PyTorch's."""

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
        # but
        # Restricting a backward to some leaves keeps the gradients of other optimizers' parameters as they
        # reentrant checkpoints refuse it: done only where such parameters exist.
        self.inputs = [entry.parameter for entry in owned] if only_owned else None
        self._factors: dict[tuple[Any, ...], Tensor] = {}
        self.yet = 1.0  # factor that the sums have yet to be multiplied by; saved with the window
        self._marks = GradientVersions(owned)

    def begin(self) -> None:
        """Start a window: no gradient of it exists yet."""
        clear(self._owned)
        self._factors.clear()
        self.yet = 1.0
        self._marks.clear()

    def backward(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters``."""
        # Before the backward: afterwards a foreign change would be inside the sum and could not be told
        # apart.
        self._marks.require()
        # The sums are multiplied by `yet` at the end, so this term is divided by it now.
        factor = factor / self.yet
        # Passed as the gradient of the loss, the factor costs no multiplication in the graph.
        # One tensor per factor: full windows have one or two factors (the last micro-batch may be smaller).
        key = (factor, loss.dtype, loss.device, loss.shape)
        gradient = self._factors.get(key)
        if gradient is None:
            gradient = self._factors[key] = loss.new_full(loss.shape, factor)
        self._run(loss, gradient, self.inputs, retain_graph=retain_graph)
        self.took(gradient)

    def backward_rounded(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters`` of a loss in bfloat16 or float16.

        Its gradient has its dtype, in which a factor such as 1/3 is wrong by 0.2 %. So the backward gets a
        power of two, and what is left of the factor, between 1/2 and 1, is applied to the sums: where the
        next factor leaves something else, and at the end.
        """
        rest, exponent = math.frexp(factor)
        self._marks.require()
        if rest != self.yet:
            present = [gradient for gradient in self._marks.gradients if gradient is not None]
            for gradient in present:
                # In place, so that a view of .grad (a flat buffer) holds the sum as well.
                gradient.mul_(self.yet / rest)
            # FSDP2 holds gradients that were not reduced beside the shards; they take the same factor.
            self._sync.scale(self.yet / rest)
            self.yet = rest
            if present:
                self._marks.set()
        self.backward(loss, math.ldexp(rest, exponent), retain_graph=retain_graph)

    def took(self, of_loss: Tensor | None = None) -> None:
        """Take the gradients that are in ``.grad`` now as the window's own, apart from that of the loss."""
        if not self._marks.set():
            return
        # A clone has a new identity and version, so what was noted no longer describes .grad.
        if unshare(self._marks.parameters, of_loss):
            self._marks.forget()
            self._marks.set()

    def savepoint(self) -> None:
        """Remember the sums as those before a micro-batch; nothing is copied."""
        self._marks.savepoint()

    def rollback(self) -> bool:
        """Restore the sums of the savepoint; False if that is impossible, and the window must restart."""
        return self._marks.rollback()

    def sums(self) -> list[Tensor | None]:
        """Return the sums so far, one per owned parameter."""
        return self._marks.gradients

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        self._marks.require()
        gradients = self._marks.gradients
        # After the last micro-batch: one multiplication in place of one for each.
        if self.yet != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(self.yet)
            self._sync.scale(self.yet)
            self.yet = 1.0
        self._marks.clear()
        return gradients

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        return torch.zeros_like(self._owned[index].parameter, requires_grad=False)

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer."""
        attach(self._owned, gradients)

    def restore(self) -> None:
        """Forget the window: everything is as before it."""
        self._marks.clear()
        clear(self._owned)

    def restart(self) -> None:
        """Restore, and begin again."""
        self.restore()
        self.begin()

    def commit(self) -> None:
        """No-op: the update rule frees the gradients."""

    def describe(self) -> str:
        """Return the kind and dtype of the sum: a window resumes only into the same."""
        return ".grad of the whole batch" if self._whole else ".grad"

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        # FSDP2 reduces first: what waits beside the shards would be missing in the saved sums.
        self._sync.flush()
        self._marks.set()
        gradients = {
            entry.name: local_part(entry.parameter.grad).clone()
            for entry in self._owned
            if entry.parameter.grad is not None
        }
        return {"gradients": gradients, "held": list(gradients), "yet": self.yet}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved sums."""
        self.yet = state.get("yet", 1.0)
        for entry in self._owned:
            gradient = state["gradients"].get(entry.name)
            if gradient is None:
                entry.parameter.grad = None
            # A DTensor's saved sum is the shard of this rank; any other parameter is its own local part.
            elif local_part(entry.parameter) is entry.parameter:
                entry.parameter.grad = gradient.to(entry.parameter.device, copy=True)
            else:
                entry.parameter.grad = torch.zeros_like(entry.parameter, requires_grad=False)
                local_part(entry.parameter.grad).copy_(gradient)
        self._marks.forget()
        self._marks.set()


class GradientVersions:
    """The gradients of parameters as the window's own backward left them.

    Args:
        owned: the parameters.

    Attributes:
        parameters: whose gradients they are.
    """

    def __init__(self, owned: list[ManagedParameter]) -> None:
        self.parameters = [entry.parameter for entry in owned]
        self._owned = owned
        # Shared by all empty windows: a list of None per window would show in the overhead.
        self._none: list[Any] = [None] * len(owned)  # never changed
        self._gradients: list[Tensor | None] = self._none
        self._versions: list[int | None] = self._none
        self._saved = (self._gradients, self._versions)

    def set(self) -> bool:
        """Note the gradients as they are now, after a backward; return whether one is there that was not."""
        before = self._versions
        self._gradients, self._versions = [], []
        for parameter in self.parameters:
            gradient = parameter.grad
            # Held here, a gradient's identity cannot be taken over by another tensor.
            self._gradients.append(gradient)
            self._versions.append(None if gradient is None else gradient._version)
        # count() runs in C; this runs after every backward.
        return None in before and before.count(None) > self._versions.count(None)

    def savepoint(self) -> None:
        """Remember the gradients noted last, with their versions, as those before a micro-batch."""
        self._saved = (self._gradients, self._versions)

    def rollback(self) -> bool:
        """Restore the gradients of the savepoint; return False if one has been written to since.

        What was noted since does not count: a backward that came to its end may fail right afterwards.
        """
        gradients, versions = self._saved
        # Every in-place addition moves the version.
        if _versions(gradients) != versions:
            return False
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._gradients, self._versions = gradients, versions
        return True

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients that are noted, one for each parameter."""
        return self._gradients

    def require(self) -> None:
        """Check that nobody else has changed a gradient since `set`.

        Raises:
            WindowError: another backward went through the parameters, or something set gradients to zero.
        """
        noted = zip(self.parameters, self._gradients, self._versions, strict=True)
        for index, (parameter, gradient, version) in enumerate(noted):
            now = parameter.grad
            # Identity finds zero_grad(set_to_none=True), the version finds zero_grad(set_to_none=False).
            if now is not gradient or (now is not None and now._version != version):
                raise foreign_gradient(self._owned[index].name)

    def clear(self) -> None:
        """Drop the gradients, those of the savepoint too."""
        self._gradients, self._versions = self._none, self._none
        self._saved = (self._none, self._none)

    def forget(self) -> None:
        """Drop the gradients: there is none before the next `set`."""
        self._gradients, self._versions = self._none, self._none


def _versions(gradients: list[Tensor | None]) -> list[int | None]:
    """Return the number of in-place writes of each gradient; None for one that is not there."""
    return [None if gradient is None else gradient._version for gradient in gradients]
