"""Protocols of a window's weights and losses: of one loss (`Weights`, `Losses`) or several (`terms`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from superbatch.normalize import Number

from .losses import Sum, WindowLoss


class WindowWeights(Protocol):
    """Weights of a window's micro-batches; `losses` are as `WindowLosses` returns them."""

    # By micro-batch; empty where all weights are known ahead.
    returned: dict[int, Number]

    @property
    def ahead(self) -> Any:
        """Weights that were known before the first backward."""
        ...

    def new_losses(self) -> WindowLosses:
        """Return an object that takes the losses of the window."""
        ...

    def has_none(self, index: int) -> bool:
        """Return whether a micro-batch is known to contribute nothing."""
        ...

    def may_be_idle(self, index: int) -> bool:
        """Return whether a micro-batch may have no weight, and so no loss to run a backward from."""
        ...

    def adds(self, index: int) -> bool:
        """Return whether a micro-batch that has had its backward contributes."""
        ...

    # A list, as terms of a low precision have a backward each.
    def scaled(self, index: int, loss: Any, weight: Any) -> list[tuple[Tensor, float]]:
        """Return the tensors to run backward on, each with its factor."""
        ...

    # Memory ran out: the samples that are left continue in smaller micro-batches.
    def weigh_again(self, microbatches: list[Any], samples: list[int] | None) -> None:
        """Weigh the micro-batches again after some were cut differently."""
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

    # Sums of all ranks are exchanged at once (`over_ranks`), and then given to `result`.
    def sums(self, losses: Any, dropped: list[int]) -> list[Sum]:
        """Return the sums of losses and weights on this rank."""
        ...

    def result(self, sums: list[Sum]) -> WindowLoss:
        """Return the loss of the batch from the sums over all ranks."""
        ...

    def loss_of(self, losses: Any, index: int) -> tuple[float, str]:
        """Return the loss of a micro-batch, and the name of the term that it is of."""
        ...

    def each(self, losses: Any) -> list[float]:
        """Return one number for each micro-batch, which is 0 where a loss is."""
        ...

    def by_name(self, index: int, loss: Any) -> Mapping[str, Tensor]:
        """Return the losses of a micro-batch that have a gradient."""
        ...


class WindowLosses(Protocol):
    """Losses of a window, by micro-batch."""

    def __contains__(self, index: int) -> bool: ...

    def __len__(self) -> int: ...

    # In two steps, as nothing may fail between a backward and its record.
    def read(self, index: int, loss: Any) -> Any:
        """Return the sum of a micro-batch's losses with this one, for `add`."""
        ...

    def add(self, index: int, total: Any) -> None:
        """Record the result of `read`."""
        ...

    # Reading a loss on a device would wait for it.
    def finite(self, index: int, *, on_host: bool = False) -> bool:
        """Return whether the loss of a micro-batch is finite; `on_host`: True for one on a device."""
        ...

    def on_device(self, index: int) -> list[Tensor]:
        """Return the parts of a micro-batch's loss that are on a device."""
        ...

    def on_host(self, count: int) -> Any:
        """Return the losses of micro-batches 0..count-1."""
        ...

    def empty(self) -> WindowLosses:
        """Return one without losses."""
        ...

    def state(self) -> dict[Any, Any]:
        """Return the losses so far."""
        ...

    def load_state(self, state: Any) -> None:
        """Resume from what `state` returned."""
        ...
