"""Norms of each micro-batch's own gradient, measured on its way into the sum.

A hook on a leaf sees what autograd is about to add to ``.grad`` (a hook after the addition would see the
running sum): no second backward, and no copy of a gradient.

A gradient may come in several parts: from a reentrant checkpoint, or from two losses of one micro-batch. Its
norm is not known from those of its parts, so from the next window on its parts are kept till all are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from superbatch.noise.meter import POWERS

from ..gradient_sum import LOW_PRECISION, ManagedParameter, values
from .adam import Norms, Preconditioner
from .samples import SeenSamples

IN_PARTS = "a gradient came in parts, which are put together from the next window on"


class _Row(NamedTuple):
    """Result of the backward of one micro-batch.

    Attributes:
        microbatch: its position.
        factor: that its gradient has yet to be multiplied by.
        parts: for each parameter the norms of its gradient, or the gradient itself where it comes in parts;
            in as many parts as came.
    """

    microbatch: int
    factor: float
    parts: list[tuple[Norms | Tensor, ...]]


class SeenGradients:
    """``|w_i g_i|^2`` of the micro-batches of one window, per parameter group.

    Args:
        owned: the parameters.
        groups: the parameter group of each, as a number.
        in_parts: parameters whose gradients are known to come in parts; those that turn out to are added.
        metric: measure them by Adam's preconditioner as well; None: do not.
        samples: see the gradients of single samples as well; None: do not.
        alone: there is one micro-batch, so that only the samples are of use.

    Attributes:
        reason: why the window cannot be measured; None: it can.
        alone: as given, also if the one micro-batch was cut into several when memory ran out.
    """

    def __init__(
        self,
        owned: Sequence[ManagedParameter],
        groups: Sequence[int],
        in_parts: set[Tensor],
        metric: Preconditioner | None = None,
        samples: SeenSamples | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._metric, self._samples, self.alone = metric, samples, alone
        self._parameters = [entry.parameter for entry in owned]
        self._groups = groups
        self._in_parts = in_parts
        self._kept = [parameter in in_parts for parameter in self._parameters] if in_parts else None
        self._slots: list[list[Norms | Tensor]] = [[] for _ in self._parameters]
        self._undo: list[Callable[[], None]] = []
        self.reason: str | None = None
        self.restart()

    def open(self) -> None:
        """Put the hooks on."""
        measured = [] if self.alone else zip(self._parameters, self._slots, strict=True)
        for place, (parameter, slot) in enumerate(measured):
            kept = self._kept is not None and self._kept[place]
            self._put_on(parameter, slot.append if kept else self._measuring(slot, place))
        if self._samples is None:
            return
        self._samples.open(self._undo)
        for parameter in self._samples.parameters():
            self._put_on(parameter, partial(self._samples.whole, parameter))

    def _put_on(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        if parameter._backward_hooks is None:
            self._undo.append(partial(_without_hooks, parameter))
        self._undo.append(parameter.register_hook(hook).remove)

    def _take_off(self) -> None:
        while self._undo:  # from the last one
            self._undo[-1]()
            self._undo.pop()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the hooks off for a while; what they saw stays."""
        self._take_off()
        try:
            yield
        finally:
            self.open()

    def close(self) -> None:
        """Take the hooks off again, so that a model is left as it was given, and forget what they saw."""
        self._take_off()
        self._take()
        self.restart()

    def before_backward(self) -> None:
        """Forget gradients that the user's own forward has asked for, as a gradient penalty does."""
        self._take()
        if self._samples is not None:
            self._samples.begin()

    def after_backward(self, index: int, factor: float) -> None:
        """Measure what a backward has added to the sum. It may fail for lack of memory: then `restart`.

        Args:
            index: of the micro-batch.
            factor: that its gradient has yet to be multiplied by.
        """
        parts = self._take()
        if self._last is not None and self._last.microbatch == index:  # another loss of the same micro-batch
            parts = [old + new for old, new in zip(self._last.parts, parts, strict=True)]
        else:
            self._end_of_microbatch()
            if index == self._ended:
                self.reason = "it was saved between two losses of one micro-batch"
        if self._samples is not None:
            self._samples.take(index)
        self._last = _Row(index, factor, parts)

    def restart(self) -> None:
        """Forget all: the window begins again."""
        self._last: _Row | None = None
        self._ended: int | None = None
        self._norms: list[tuple[int, int, float, Norms]] = []  # micro-batch, group, factor, norms
        self._per_sample: list[tuple[int, float, Norms]] = []
        self._squares: dict[int, list[float]] = {}
        if self._samples is not None:
            self._samples.forget()

    def squares(self) -> dict[int, list[float]]:
        """Return ``|w_i g_i|^2`` by micro-batch, as they were summed.

        Returns:
            One number per parameter group; then, over all of them, one per power of Adam's preconditioner if
            there is a `metric`; then the sum over single samples if these are seen. NaN stands for what could
            not be measured.
        """
        self._end_of_microbatch()
        rows = [*(norms for *_, norms in self._norms), *(norms for *_, norms in self._per_sample)]
        on_hosts = iter(on_host([norm for norms in rows for norm in norms]))
        count = max(self._groups, default=0) + 1
        powers = 0 if self._metric is None else len(POWERS)
        columns = count + powers + (self._samples is not None)
        for index, group, factor, _ in self._norms:
            row = self._squares.setdefault(index, [0.0] * columns)
            for column in (group, *range(count, count + powers)):
                norm = factor * next(on_hosts)
                row[column] += norm * norm  # a power that overflows raises; infinity is left out
        for index, factor, norms in self._per_sample:
            assert self._samples is not None
            seen = self._samples.judge(*(next(on_hosts) for _ in norms))
            self._squares.setdefault(index, [0.0] * columns)[-1] = factor * seen * (factor * seen)
        self._norms, self._per_sample = [], []
        return self._squares

    def state(self) -> dict[int, list[float]]:
        """Return the part of a window in flight that is to be saved."""
        return {index: list(each) for index, each in self.squares().items()}

    def load(self, squares: dict[int, list[float]]) -> None:
        """Resume from what `state` returned."""
        self._squares = {index: list(each) for index, each in squares.items()}

    def _take(self) -> list[tuple[Norms | Tensor, ...]]:
        """Take what the hooks have seen since the last time."""
        seen = [tuple(slot) for slot in self._slots]
        for slot in self._slots:
            slot.clear()
        return seen

    def _end_of_microbatch(self) -> None:
        if self._last is None:
            return
        index, factor, seen = self._last
        for place, (parts, group) in enumerate(zip(seen, self._groups, strict=True)):
            if not parts:
                continue
            if self._kept is not None and self._kept[place]:
                gradient = _sum(parts)
                self._norms.append(
                    (index, group, factor, (_norm(gradient), *self._by_metric(place, gradient)))
                )
                continue
            if len(parts) > 1:
                self._in_parts.add(self._parameters[place])
                self.reason = IN_PARTS
            for part in parts:
                assert isinstance(part, tuple)
                self._norms.append((index, group, factor, part))
        if self._samples is not None:
            self._per_sample.append((index, factor, self._samples.end()))
        self._last, self._ended = None, index

    def _by_metric(self, place: int, gradient: Tensor) -> Norms:
        return () if self._metric is None else self._metric.norms(place, gradient)

    def _measuring(self, slot: list[Norms | Tensor], place: int) -> Callable[[Tensor], None]:
        parameter, metric = self._parameters[place], self._metric
        dtype = torch.float32 if parameter.dtype in LOW_PRECISION else None
        # On the CPU a number, at once: a tensor kept between the large ones would break up the heap, which
        # then goes back to the system and is fetched again in every window (4 % of the time of a small
        # transformer).
        on_host_at_once = parameter.device.type == "cpu"

        def hook(gradient: Tensor) -> None:
            norm = torch.linalg.vector_norm(values(gradient), dtype=dtype)
            slot.append((norm.item() if on_host_at_once else norm,))

        def by_metric(gradient: Tensor) -> None:
            assert metric is not None
            slot.append((_norm(gradient), *metric.norms(place, gradient)))

        return hook if metric is None else by_metric


def _without_hooks(parameter: Tensor) -> None:
    """Drop an empty dictionary of hooks, which would be called in each backward."""
    if not parameter._backward_hooks:
        parameter._backward_hooks = None


def _sum(parts: Sequence[Norms | Tensor]) -> Tensor:
    gradient = None
    for part in parts:
        assert isinstance(part, Tensor)
        gradient = part if gradient is None else gradient + part
    assert gradient is not None
    return gradient


def _norm(gradient: Tensor) -> float | Tensor:
    dtype = torch.float32 if gradient.dtype in LOW_PRECISION else None
    norm = torch.linalg.vector_norm(values(gradient), dtype=dtype)
    return norm.item() if norm.is_cpu else norm


def on_host(norms: Sequence[float | Tensor]) -> list[float]:
    """Return numbers, of which some are 0-d tensors, by one transfer for each device.

    Args:
        norms: numbers and tensors.

    Examples:
        >>> on_host([1.0, torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64)])
        [1.0, 2.0, 3.0]
    """
    found = [0.0 if isinstance(norm, Tensor) else norm for norm in norms]
    by_device: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for place, norm in enumerate(norms):
        if isinstance(norm, Tensor):
            by_device.setdefault((norm.device, norm.dtype), []).append((place, norm))
    for tensors in by_device.values():
        stacked = torch.stack([norm for _, norm in tensors]).tolist()
        for (place, _), value in zip(tensors, stacked, strict=True):
            found[place] = value
    return found
