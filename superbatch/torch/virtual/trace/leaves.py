"""Real tensors that get a gradient in a virtual batch, whether they are parameters of its models or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Leaves:
    """The leaves of autograd's graph that the program used, and the gradients that they had.

    Attributes:
        had: by the leaf's id: the leaf, and its gradient of before.
    """

    def __init__(self) -> None:
        self.had: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._walked: set[Any] = set()  # nodes of autograd's graph

    def new(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the new leaves of a real tensor, while their gradients are as they were.

        One may have been used before there was a batch: `scale.exp()`, computed above the block, brings the
        gradient of `scale` in it.
        """
        if not tensor.requires_grad:
            return
        found = (tensor,) if tensor.is_leaf else self._behind(tensor.grad_fn)
        for leaf in found:
            if id(leaf) not in self.had:
                self.had[id(leaf)] = leaf, leaf.grad
                yield leaf

    def _behind(self, node: Any) -> list[Tensor]:
        """The leaves that a node of autograd's graph brings gradients to, but for nodes that were walked."""
        found: list[Tensor] = []
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node in self._walked:
                continue
            self._walked.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                found.append(leaf)
            todo += [before for before, _ in node.next_functions]
        return found

    def clear(self) -> None:
        """Free the leaves, and autograd's graph."""
        self.had.clear()
        self._walked.clear()
