"""Gradients of one call, kept apart from earlier ones in ``.grad`` until the call is complete.

``loss.backward()`` adds to ``.grad``. A call with several backwards may fail between two of them, and its
gradients may have to be summed over ranks without the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..window.participants.gradient_sum import steps_in_backward, unshare
from ..window.sync.sync import Sync


class NewGradients:
    """Removes earlier gradients from ``.grad``; at the end new gradients are added to them, or discarded.

    Raises:
        OptimizerError: a hook steps a parameter inside the backward.

    Examples:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.ones(1, 1)
        >>> new = NewGradients([layer])
        >>> layer(torch.full((1, 1), 2.0)).sum().backward()
        >>> layer.weight.grad, new.add(), layer.weight.grad
        (tensor([[2.]]), None, tensor([[3.]]))
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        names = {p: name for model in models for name, p in model.named_parameters() if p.requires_grad}
        for parameter, name in names.items():
            # Private, because torch has no other mark of an optimizer that steps inside the backward.
            if hasattr(parameter, "_in_backward_optimizers"):
                raise steps_in_backward(name)
        self._before: dict[Tensor, Tensor | None] = {}
        for parameter in names:
            self.hold(parameter)
        self.parameters = list(names)

    def hold(self, leaf: Tensor) -> None:
        """Move the earlier gradient of one more tensor out of ``.grad``, before a backward reaches it."""
        if leaf not in self._before:
            self._before[leaf] = leaf.grad
            # None, to distinguish a tensor without a new gradient from one with zeros.
            leaf.grad = None

    def knows(self, leaf: Tensor) -> bool:
        """Return whether `hold` was called for a tensor."""
        return leaf in self._before

    def unshare(self, others: Iterable[Tensor] = ()) -> None:
        """Copy gradients of the models and of `others` that share memory, after a backward."""
        unshare([*self._before, *others])

    def reduce(self, sync: Sync) -> None:
        """Sum the gradients of the models' parameters over the ranks, once."""
        summed = sync.reduce(
            [parameter.grad for parameter in self.parameters],
            self.parameters,
            # A rank without a gradient that others have takes part with zeros.
            lambda index: torch.zeros_like(self.parameters[index], requires_grad=False),
        )
        for parameter, gradient in zip(self.parameters, summed, strict=True):
            parameter.grad = gradient

    def drop_parameters(self) -> None:
        """Remove the gradients that the models' parameters have so far."""
        for parameter in self.parameters:
            parameter.grad = None

    def add(self) -> None:
        """Add the new gradients to the earlier ones, in place, as ``loss.backward()`` does."""
        with torch.no_grad():
            for leaf, old in self._before.items():
                leaf.grad = _sum(old, leaf.grad)
        self._before = {}

    def discard(self) -> None:
        """Restore the earlier gradients, and discard the new ones."""
        for leaf, old in self._before.items():
            leaf.grad = old
        self._before = {}


def _sum(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    # A dense tensor cannot be added to a sparse one in place.
    if old.is_sparse and not new.is_sparse:
        return new.add_(old)
    # In place, because other code may refer to the tensor in .grad.
    return old.add_(new)


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaf tensors that would get a gradient in a backward from some tensors.

    Args:
        roots: results of a forward, with a graph. Leaves hidden inside a reentrant checkpoint or a custom
            autograd function are not found.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> len(leaves_of([layer(torch.ones(1, 2))]))
        2
    """
    found: dict[Tensor, None] = {root: None for root in roots if root.is_leaf and root.requires_grad}
    stack: list[Any] = [root.grad_fn for root in roots]
    # None is the node of an input without a graph.
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        # The node of a leaf, AccumulateGrad, has this attribute.
        if hasattr(node, "variable"):
            found[node.variable] = None
        stack.extend(following for following, _ in node.next_functions)
    return list(found)


@contextmanager
def outside_autocast(devices: Iterable[torch.device]) -> Iterator[None]:
    """Disable the caller's autocast during the block, because it would also cast operations of a backward.

    Args:
        devices: devices beside the CPU.

    Examples:
        >>> with torch.autocast("cpu", torch.bfloat16), outside_autocast([]):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    with ExitStack() as stack:
        for kind in sorted({"cpu", *(device.type for device in devices)}):
            # Checked first, because is_autocast_enabled raises for devices without autocast.
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
