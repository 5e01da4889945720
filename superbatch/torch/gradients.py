"""What a window sums gradients for, and what the places where it can do so have in common.

There are three places - `in_grad`, `in_buffers`, `in_momentum` - with the same methods::

    open()                        the window starts: no gradient of it exists yet
    backward(loss, factor)        add factor * d loss / d parameters
    close()                       the sums, one per owned parameter (None: it had no gradient), ready to be
    normalised
    zeros(index)                  a gradient of zeros for one owned parameter
    attach(gradients)             hand them to the optimizer as `.grad` of the targets, rounded once if need
    be
    discard()                     as before the window
    state(), load_state(state)    the sum so far, to save a window in flight

`factor` comes from `superbatch.normalize`. A *target* is what the optimizer updates: the parameter
itself, or its float32 master copy.
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
        optimizer: whose it is.
        number: of its parameter group there.
    """

    name: str
    parameter: Tensor
    target: Tensor
    optimizer: torch.optim.Optimizer
    number: int

    @property
    def group(self) -> Mapping[str, Any]:
        """The parameter group as it is now: loading an optimizer's state makes new ones."""
        return self.optimizer.param_groups[self.number]


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
