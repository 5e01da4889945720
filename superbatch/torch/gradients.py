"""Where a window's gradient is summed: in ``.grad``, in wider buffers, or in SGD's momentum buffer.

Three classes with the same methods, one per place; a window uses one of them from open to close::

    open()                        the window starts: no gradient of it exists yet
    backward(loss, factor)        add factor * d loss / d parameters
    close()                       the sums, one per owned parameter (None: it had no gradient), ready to be
    normalised
    zeros(index)                  a gradient of zeros for one owned parameter
    attach(gradients)             hand them to the optimizer as `.grad` of the targets, rounded once if need
    be
    discard()                     as before the window
    state(), load_state(state)    the sum so far, to save a window in flight

`factor` comes from :mod:`superbatch.normalize`. A *target* is what the optimizer updates: the parameter
itself, or
its float32 master copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Owned:
    """A parameter that the window's optimizers own.

    Attributes:
        name: its path in the model, or its place in the optimizer for a parameter outside the models.
        parameter: what the model computes with.
        target: what the optimizer updates.
        group: the optimizer's parameter group.
    """

    name: str
    parameter: Tensor
    target: Tensor
    group: Mapping[str, Any]


class Gradients(Protocol):
    """What the three places have in common."""

    def open(self) -> None:
        """Start a window: no gradient of it exists yet."""
        ...

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add ``factor * d loss / d parameters``."""
        ...

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        ...

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        ...

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer."""
        ...

    def discard(self) -> None:
        """Forget the window: everything is as before it."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the sums so far."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from saved sums."""
        ...


def clear(owned: list[Owned]) -> None:
    """Drop the gradients of the parameters and their targets (to None, so that no memory is held)."""
    for entry in owned:
        entry.parameter.grad = None
        entry.target.grad = None


class InGrad:
    """Sum in ``.grad`` by autograd itself: no memory and no pass beyond plain PyTorch's."""

    def __init__(self, owned: list[Owned], *, only_owned: bool) -> None:
        self._owned = owned
        # Restricting a backward to some leaves keeps the gradients of other optimizers' parameters as they
        # are,
        # but reentrant checkpoints refuse it: so only where there are other parameters.
        self._inputs = [entry.parameter for entry in owned] if only_owned else None
        self._factors: dict[tuple[Any, ...], Tensor] = {}

    def open(self) -> None:
        """Start a window: no gradient of it exists yet."""
        clear(self._owned)
        self._factors.clear()

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add ``factor * d loss / d parameters``."""
        # Passed as the gradient of the loss, the factor costs no multiplication in the graph.
        key = (factor, loss.dtype, loss.device, loss.shape)
        gradient = self._factors.get(key)
        if gradient is None:
            gradient = self._factors[key] = torch.full_like(loss, factor, requires_grad=False)
        torch.autograd.backward(loss, gradient, inputs=self._inputs)

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        return [entry.parameter.grad for entry in self._owned]

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        return torch.zeros_like(self._owned[index].parameter, requires_grad=False)

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer."""
        attach(self._owned, gradients)

    def discard(self) -> None:
        """Forget the window: everything is as before it."""
        clear(self._owned)

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


class InBuffers:
    """Sum in buffers of a wide dtype; the gradient of each micro-batch is freed as soon as it is added.

    With `isolated=True` a micro-batch's gradient waits after its backward until it is kept or dropped.

    Args:
        owned: the parameters.
        dtype: of the buffers of parameters of lower precision; wider parameters keep their own dtype.
        isolated: look at each micro-batch's gradient as a whole before adding it.
        only_owned: restrict the backward to these parameters.
    """

    def __init__(
        self,
        owned: list[Owned],
        dtype: torch.dtype | None,
        *,
        isolated: bool = False,
        only_owned: bool = False,
    ) -> None:
        self._owned = owned
        self._dtype = dtype
        self._isolated = isolated
        self._inputs = [entry.parameter for entry in owned] if only_owned else None
        self._buffers: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._factor = 1.0

    def open(self) -> None:
        """Start a window: no gradient of it exists yet."""
        clear(self._owned)
        self._buffers.clear()
        if not self._isolated:
            self._hooks = add_after_gradient(self._owned, self._add)

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add ``factor * d loss / d parameters``."""
        self._factor = factor
        torch.autograd.backward(loss, inputs=self._inputs)

    def isolated_is_finite(self) -> bool:
        """Whether the isolated gradient of the last micro-batch is finite."""
        return all_finite([e.parameter.grad for e in self._owned if e.parameter.grad is not None])

    def keep(self) -> None:
        """Add the isolated gradient of the last micro-batch to the sum."""
        for entry in self._owned:
            if entry.parameter.grad is not None:
                self._add(entry)

    def drop(self) -> None:
        """Forget the isolated gradient of the last micro-batch."""
        for entry in self._owned:
            entry.parameter.grad = None

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        remove(self._hooks)
        return [self._buffers.pop(entry.name, None) for entry in self._owned]

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        parameter = self._owned[index].parameter
        return torch.zeros_like(parameter, dtype=self._sum_dtype(parameter), requires_grad=False)

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer."""
        attach(self._owned, gradients)

    def discard(self) -> None:
        """Forget the window: everything is as before it."""
        remove(self._hooks)
        self._buffers.clear()
        clear(self._owned)

    def state(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from saved sums."""
        devices = {entry.name: entry.parameter.device for entry in self._owned}
        self._buffers = {name: buffer.to(devices[name], copy=True) for name, buffer in state.items()}

    def _add(self, entry: Owned) -> None:
        gradient = entry.parameter.grad
        assert gradient is not None
        entry.parameter.grad = None
        buffer = self._buffers.get(entry.name)
        if buffer is None:
            self._buffers[entry.name] = gradient.to(self._sum_dtype(gradient)).mul_(self._factor)
        else:
            buffer.add_(gradient, alpha=self._factor)

    def _sum_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.dtype in LOW_PRECISION else tensor.dtype


class InMomentum:
    """Sum straight into SGD's momentum buffer: no gradient buffer at all.

    With momentum ``mu``, weight decay ``d`` and the normalised gradient ``g``, SGD computes ``v = mu v + d p
    + g``
    and ``p = p - lr v``; ``v`` is linear in ``g``, so the sum over micro-batches can be taken in it (exact).
    A copy of the buffer on the host puts it back if the window fails.
    """

    def __init__(self, owned: list[Owned], optimizer: torch.optim.Optimizer) -> None:
        self._owned = owned
        self._state: dict[Any, dict[str, Any]] = optimizer.state
        self._before: dict[str, Tensor | None] = {}
        self._hooks: list[RemovableHandle] = []
        self._factor = 1.0

    def open(self) -> None:
        """Start a window: no gradient of it exists yet."""
        clear(self._owned)
        self._before.clear()
        self._hooks = add_after_gradient(self._owned, self._add)

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add ``factor * d loss / d parameters``."""
        self._factor = factor
        torch.autograd.backward(loss)

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        remove(self._hooks)
        return [None] * len(self._owned)

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        raise NotImplementedError("momentum buffers are not summed over ranks")

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer: there are none."""

    def finite(self) -> bool:
        """Whether every momentum buffer that the window touched is finite."""
        return all_finite([self._state[e.target]["momentum_buffer"] for e in self._touched()])

    def apply(self) -> None:
        """Move the parameters: ``p -= lr v`` for each that had a gradient."""
        with torch.no_grad():
            for entry in self._touched():
                entry.target.add_(
                    self._state[entry.target]["momentum_buffer"], alpha=-float(entry.group["lr"])
                )
        self._before.clear()

    def discard(self) -> None:
        """Forget the window: everything is as before it."""
        remove(self._hooks)
        with torch.no_grad():
            for entry in self._touched():
                before = self._before[entry.name]
                if before is None:
                    del self._state[entry.target]
                else:
                    self._state[entry.target]["momentum_buffer"].copy_(before)
        self._before.clear()
        clear(self._owned)

    def state(self) -> dict[str, Any]:
        """Return the sums so far."""
        buffers = {e.name: self._state[e.target]["momentum_buffer"].clone() for e in self._touched()}
        return {"momentum": buffers, "before": dict(self._before)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from saved sums."""
        self._before = dict(state["before"])
        for entry in self._touched():
            buffer = state["momentum"][entry.name].to(entry.target.device, copy=True)
            self._state.setdefault(entry.target, {})["momentum_buffer"] = buffer

    def _touched(self) -> list[Owned]:
        return [entry for entry in self._owned if entry.name in self._before]

    def _add(self, entry: Owned) -> None:
        gradient = entry.parameter.grad
        assert gradient is not None
        entry.parameter.grad = None
        if entry.name not in self._before:
            self._start(entry)
        sign = -1.0 if entry.group["maximize"] else 1.0
        self._state[entry.target]["momentum_buffer"].add_(gradient, alpha=sign * self._factor)

    def _start(self, entry: Owned) -> None:
        """Make the buffer what SGD would have before the gradient is added: ``mu v + d p``."""
        group, target = entry.group, entry.target
        buffer = self._state.get(target, {}).get("momentum_buffer")
        self._before[entry.name] = None if buffer is None else buffer.to("cpu", copy=True)
        if buffer is None:
            buffer = torch.zeros_like(target, memory_format=torch.preserve_format, requires_grad=False)
            self._state.setdefault(target, {})["momentum_buffer"] = buffer
        else:
            buffer.mul_(group["momentum"])
        if group["weight_decay"]:
            buffer.add_(target.detach(), alpha=group["weight_decay"])


def attach(owned: list[Owned], gradients: list[Tensor | None]) -> None:
    """Make the gradients the targets' ``.grad``, rounded here, once, where a target has a narrower dtype."""
    for entry, gradient in zip(owned, gradients, strict=True):
        if gradient is not entry.target.grad:
            entry.target.grad = None if gradient is None else gradient.to(entry.target.dtype)


def add_after_gradient(owned: list[Owned], add: Callable[[Owned], None]) -> list[RemovableHandle]:
    """Call ``add(entry)`` each time autograd has put a gradient into ``entry.parameter.grad``."""

    def hook_of(entry: Owned) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            with torch.no_grad():
                add(entry)

        return hook

    return [entry.parameter.register_post_accumulate_grad_hook(hook_of(entry)) for entry in owned]


def remove(hooks: list[RemovableHandle]) -> None:
    """Take hooks off again, so that a model is left as it was given."""
    while hooks:
        hooks.pop().remove()


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether no element of any tensor is NaN or infinite (sparse tensors: of their values).

    Examples:
        >>> all_finite([torch.zeros(2), torch.tensor([1.0, float("inf")])])
        False
    """
    dense = [values(tensor) for tensor in tensors]
    if not dense:
        return True
    # The largest magnitude is not finite iff some element is not; unlike the 2-norm it cannot overflow.
    infinity = float("inf")
    largest = torch._foreach_norm(dense, infinity)  # pyright: ignore[reportPrivateImportUsage]  (as torch.optim does)
    return bool(torch.stack([norm.isfinite() for norm in largest]).all())


def values(tensor: Tensor) -> Tensor:
    """Return a gradient's elements: the tensor itself, or the summed values of a sparse one."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor
