"""Protocols of a window's weights and losses, which one loss (`Weights`, `Losses`) and `terms` implement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from superbatch.normalize import Number

from .losses import Sum, WindowLoss


class WindowWeights(Protocol):
    """Weights of a window's micro-batches; arguments `losses` are results of `WindowLosses.on_host`."""

    # By micro-batch; empty if all weights are known before the first backward.
    returned: dict[int, Number]

    @property
    def ahead(self) -> Any:
        """Weights that were known before the first backward."""
        ...

    def new_losses(self) -> WindowLosses:
        """Return an empty object for the losses of the window."""
        ...

    def is_known_zero(self, index: int) -> bool:
        """Return whether the weight of a micro-batch is known to be 0, so that its forward can be skipped."""
        ...

    def may_have_zero_weight(self, index: int) -> bool:
        """Return whether the weight of a micro-batch may be 0, so that it has no loss for a backward."""
        ...

    def contributes(self, index: int) -> bool:
        """Return whether a micro-batch contributes, after its backward."""
        ...

    # A list, because each term of low precision has its own backward.
    def scaled(self, index: int, loss: Any, weight: Any) -> list[tuple[Tensor, float]]:
        """Return the tensors to run backward on, each with its factor."""
        ...

    def weigh_again(self, microbatches: list[Any], samples: list[int] | None) -> None:
        """Compute the weights again after micro-batches were cut differently, e.g. for lack of memory."""
        ...

    def counted(self, dropped: list[int]) -> list[Number]:
        """Return the weights in order, 0 for micro-batches that were left out."""
        ...

    def took_part(self, dropped: list[int]) -> list[int]:
        """Return the micro-batches whose losses are in the sum."""
        ...

    def not_finite(self, losses: Any, dropped: list[int]) -> list[int]:
        """Return the micro-batches in the sum whose losses are NaN or infinite."""
        ...

    # `over_ranks` adds these up over the ranks, and the totals are passed to `result`.
    def sums(self, losses: Any, dropped: list[int]) -> list[Sum]:
        """Return the sums of losses and weights on this rank."""
        ...

    def result(self, sums: list[Sum]) -> WindowLoss:
        """Return the loss of the batch from the sums over all ranks."""
        ...

    def loss_of(self, losses: Any, index: int) -> tuple[float, str]:
        """Return the loss of a micro-batch and its term; of several terms, the first that is not finite."""
        ...

    def one_per_microbatch(self, losses: Any) -> list[float]:
        """Return one number for each micro-batch, which is 0 if one of its losses is 0."""
        ...

    def by_name(self, index: int, loss: Any) -> Mapping[str, Tensor]:
        """Return the losses of a micro-batch that have a gradient."""
        ...


class WindowLosses(Protocol):
    """Losses of a window, by micro-batch."""

    def __contains__(self, index: int) -> bool: ...

    def __len__(self) -> int: ...

    # `read` before the backward and `add` after it, because nothing may fail between a backward and its
    # record.
    def read(self, index: int, loss: Any) -> Any:
        """Return the sum of a micro-batch's losses with this one, for `add`."""
        ...

    def add(self, index: int, total: Any) -> None:
        """Record the result of `read`."""
        ...

    def finite(self, index: int, *, on_host: bool = False) -> bool:
        """Return whether a micro-batch's loss is finite; with `on_host`, one on a device counts as finite."""
        ...

    def on_device(self, index: int) -> list[Tensor]:
        """Return the parts of a micro-batch's loss that are on a device."""
        ...

    def on_host(self, count: int) -> Any:
        """Return the losses of micro-batches 0..count-1."""
        ...

    def empty(self) -> WindowLosses:
        """Return a new object without losses."""
        ...

    def state(self) -> dict[Any, Any]:
        """Return the losses so far."""
        ...

    def load_state(self, state: Any) -> None:
        """Load the losses of `state`."""
        ...
