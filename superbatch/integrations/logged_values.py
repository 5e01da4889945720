"""Values that a `training_step` logs in the micro-batches of a window, and their means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import normalize


class LoggedValues:
    """Participant of a window that records the values logged in its micro-batches.

    Values of a micro-batch that is rolled back are discarded. Nothing is recorded when `training_step` runs
    outside micro-batches, for a check of its loss.

    Attributes:
        is_inside: True in a window: values are recorded and not passed to Lightning.
        ignores_checks: True, as forwards outside micro-batches record nothing.
    """

    ignores_checks = True

    def __init__(self) -> None:
        self._entries: list[tuple[str, Any, dict[str, Any], Any]] = []
        self._mark = 0
        self.is_inside = self._expects = self._keeps = False
        self._weigh: Callable[[], Any] | None = None
        self._weight: Any = None

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Record values that are logged in this context, instead of passing them to Lightning."""
        self.is_inside, self._expects = True, False
        self._entries.clear()
        try:
            yield
        finally:
            self.is_inside, self._weigh = False, None

    def start(self, weigh: Callable[[], Any]) -> bool:
        """Begin a call of `training_step`; return True if it is for a micro-batch of the window.

        Args:
            weigh: returns the weight of the batch of this call.
        """
        self._keeps, self._expects, self._weigh, self._weight = self._expects, False, weigh, None
        return self._keeps

    def note(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Record a value of a micro-batch.

        Args:
            name: name of the value.
            value: the logged value.
            options: options of `LightningModule.log`.
        """
        if self._keeps and self._weigh is not None:
            self._weight = self._weigh() if self._weight is None else self._weight
            number = value.detach() if isinstance(value, Tensor) else value  # the graph would stay in memory
            self._entries.append((name, number, options, self._weight))

    def means(
        self, samples: int | None, over_ranks: Callable[[Tensor], Tensor]
    ) -> list[tuple[str, Any, dict[str, Any]]]:
        """Return the values to log: one mean over the window for a value with ``reduce_fx="mean"``.

        Args:
            samples: samples of the window; None if not known.
            over_ranks: sums a number over all ranks.
        """
        by_name: dict[str, list[Any]] = {}
        for name, value, options, weight in self._entries:
            by_name.setdefault(name, []).append((value, options, weight))
        self._entries.clear()
        logged: list[tuple[str, Any, dict[str, Any]]] = []
        for name, entries in by_name.items():
            value, options, _ = entries[-1]
            # A sum, minimum or maximum over micro-batches is right without weights: Lightning computes it.
            if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
                logged += [(name, each, given) for each, given, _ in entries]
                continue
            if isinstance(value, Tensor | float | int):
                value = _mean(entries, over_ranks if options.get("sync_dist") else None)
            sizes = [given.get("batch_size") for _, given, _ in entries]
            size = samples if None in sizes else sum(sizes)
            logged.append((name, value, options if size is None else {**options, "batch_size": size}))
        return logged

    def begin(self) -> None:
        """Expect one call of `training_step`, as a whole batch of coupled samples has no savepoint."""
        self.savepoint()

    def savepoint(self) -> None:
        """Expect one call of `training_step`."""
        self._mark, self._expects = len(self._entries), True

    def rollback(self) -> bool:
        """Discard the values of the micro-batch."""
        del self._entries[self._mark :]
        return True

    def restart(self) -> None:
        """Discard all values."""
        self._entries.clear()
        self._expects = True

    def restore(self) -> None:
        """Discard all values."""
        self._entries.clear()

    def commit(self) -> None:
        """Expect no further call."""
        self._expects = False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning saves no checkpoint inside a window."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op."""


def _mean(entries: list[Any], over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
    values = [torch.as_tensor(value) for value, _, _ in entries]
    weights = [weight for _, _, weight in entries]
    total = normalize.total_weight(weights)
    if over_ranks is not None:
        total = over_ranks(torch.tensor(float(total), dtype=torch.float64, device=values[0].device)).item()
    # Skip values of weight 0: they may be NaN, from a mean over nothing.
    shares = [
        value * normalize.scale(weight, total, reduction="mean")
        for value, weight in zip(values, weights, strict=True)
        if weight
    ]
    mean = torch.stack(shares or [torch.zeros_like(values[0])]).sum()
    return mean if over_ranks is None else over_ranks(mean)
