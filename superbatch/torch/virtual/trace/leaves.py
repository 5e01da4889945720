"""Leaves of autograd that receive a gradient in the block, parameters of the models or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Leaves:
    """Leaves that the program used, with their gradients from before.

    Attributes:
        had: by the leaf's id: the leaf, and the gradient that it had.
    """

    def __init__(self) -> None:
        self.had: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._walked: set[Any] = set()  # visited nodes of autograd's graph

    def new(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the leaves of a real tensor that were not registered before."""
        # Not only the tensor itself: `scale.exp()`, computed before the block, brings `scale` a gradient.
        if not tensor.requires_grad:
            return
        found = (tensor,) if tensor.is_leaf else self._behind(tensor.grad_fn)
        for leaf in found:
            if id(leaf) not in self.had:
                self.had[id(leaf)] = leaf, leaf.grad
                yield leaf

    def _behind(self, node: Any) -> list[Tensor]:
        """Return the leaves behind a node of autograd's graph, without nodes that were visited before."""
        found: list[Tensor] = []
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node in self._walked:
                continue
            self._walked.add(node)
            # An AccumulateGrad node, the end of a path, holds its leaf.
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                found.append(leaf)
            todo += [before for before, _ in node.next_functions]
        return found

    def clear(self) -> None:
        """Free the leaves and the nodes of autograd's graph."""
        self.had.clear()
        self._walked.clear()
