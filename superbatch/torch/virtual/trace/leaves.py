"""Leaves of autograd that get a gradient in the block, parameters of the models or others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Leaves:
    """Leaves that the program used, with their old gradients.

    Attributes:
        gradients: by the id of a leaf, the leaf and its gradient before the block used it.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._walked: set[Any] = set()  # visited nodes of autograd's graph

    def new(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the leaves of a real tensor that were not registered before."""
        # `scale.exp()`, computed before the block, gives `scale` a gradient.
        if not tensor.requires_grad:
            return
        leaves = (tensor,) if tensor.is_leaf else self._behind(tensor.grad_fn)
        for leaf in leaves:
            if id(leaf) not in self.gradients:
                self.gradients[id(leaf)] = leaf, leaf.grad
                yield leaf

    def _behind(self, node: Any) -> list[Tensor]:
        """Return the leaves behind a node of autograd's graph, without those behind visited nodes."""
        leaves: list[Tensor] = []
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node in self._walked:
                continue
            self._walked.add(node)
            # An AccumulateGrad node, at the end of a path, has its leaf.
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.append(leaf)
            todo += [before for before, _ in node.next_functions]
        return leaves

    def clear(self) -> None:
        """Free the leaves and the nodes of autograd's graph."""
        self.gradients.clear()
        self._walked.clear()
