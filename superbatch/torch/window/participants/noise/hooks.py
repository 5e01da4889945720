"""Norms of each micro-batch's own gradient, measured before autograd adds it to the sum.

A hook on a leaf gets the gradient that autograd is about to add to ``.grad``, so no second backward and no
copy of a gradient is needed. (A hook after the addition would get the sum so far.)

A gradient may come in several parts, from a reentrant checkpoint or from two losses of one micro-batch. Its
norm cannot be computed from those of the parts, so from the next window on its parts are kept until all have
arrived.
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
from .samples import SampleGradientNorms

IN_PARTS = "a gradient came in several parts, which are added up from the next window on"


class _Row(NamedTuple):
    """Result of the backward of one micro-batch.

    Attributes:
        microbatch: index of the micro-batch.
        factor: factor by which its gradient must still be multiplied.
        parts: for each parameter a tuple with an entry for each part of its gradient: the part's norms, or
            the part itself if the gradient is known to come in parts.
    """

    microbatch: int
    factor: float
    parts: list[tuple[Norms | Tensor, ...]]


class MicrobatchGradientNorms:
    """Measures ``|w_i g_i|^2`` of the micro-batches of one window, per parameter group.

    Args:
        owned: the parameters.
        groups: number of the parameter group of each parameter.
        in_parts: parameters whose gradients are known to come in parts; new ones are added to the set.
        metric: Adam's preconditioner, which measures the gradients in a second way; None: do not.
        samples: also measures the gradients of single samples; None: do not.
        is_single: the window has one micro-batch, so only single samples can be measured.

    Attributes:
        reason: reason why the window cannot be measured; None: it can.
        is_single: the argument, even if the micro-batch was cut into several after memory ran out.
    """

    def __init__(
        self,
        owned: Sequence[ManagedParameter],
        groups: Sequence[int],
        in_parts: set[Tensor],
        metric: Preconditioner | None = None,
        samples: SampleGradientNorms | None = None,
        *,
        is_single: bool = False,
    ) -> None:
        self._metric, self._samples, self.is_single = metric, samples, is_single
        self._parameters = [entry.parameter for entry in owned]
        self._groups = groups
        self._in_parts = in_parts
        self._keeps_parts = [parameter in in_parts for parameter in self._parameters] if in_parts else None
        self._slots: list[list[Norms | Tensor]] = [[] for _ in self._parameters]
        self._undo: list[Callable[[], None]] = []
        self.reason: str | None = None
        self.restart()

    def open(self) -> None:
        """Register the hooks."""
        measured = [] if self.is_single else zip(self._parameters, self._slots, strict=True)
        for number, (parameter, slot) in enumerate(measured):
            kept = self._keeps_parts is not None and self._keeps_parts[number]
            # A gradient in several parts is kept until its last part has arrived.
            self._register(parameter, slot.append if kept else self._measuring_hook(slot, number))
        if self._samples is None:
            return
        self._samples.open(self._undo)
        for parameter in self._samples.parameters():
            self._register(parameter, partial(self._samples.record_gradient, parameter))

    def _register(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        if parameter._backward_hooks is None:
            self._undo.append(partial(_without_hooks, parameter))
        self._undo.append(parameter.register_hook(hook).remove)

    def _remove_hooks(self) -> None:
        while self._undo:  # the last hook first
            self._undo[-1]()
            self._undo.pop()

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Return a context in which the hooks are removed; their measurements are kept."""
        self._remove_hooks()
        try:
            yield
        finally:
            self.open()

    def close(self) -> None:
        """Remove the hooks, and discard their measurements."""
        self._remove_hooks()
        self._take()
        self.restart()

    def before_backward(self) -> None:
        """Discard gradients that the user's forward has computed itself, e.g. for a gradient penalty."""
        self._take()
        if self._samples is not None:
            self._samples.begin_backward()

    def after_backward(self, index: int, factor: float) -> None:
        """Measure the gradient that a backward has added to the sum; call `restart` if memory runs out.

        Args:
            index: index of the micro-batch.
            factor: factor by which its gradient must still be multiplied.
        """
        parts = self._take()
        if self._last is not None and self._last.microbatch == index:  # another loss of the same micro-batch
            parts = [old + new for old, new in zip(self._last.parts, parts, strict=True)]
        else:
            self._end_of_microbatch()
            if index == self._ended:
                self.reason = "it was saved between two losses of one micro-batch"
        if self._samples is not None:
            self._samples.end_backward(index)
        self._last = _Row(index, factor, parts)

    def restart(self) -> None:
        """Discard all measurements, because the window begins again."""
        self._last: _Row | None = None
        self._ended: int | None = None
        self._norms: list[tuple[int, int, float, Norms]] = []  # micro-batch, group, factor, norms
        self._per_sample: list[tuple[int, float, Norms]] = []
        self._squares: dict[int, list[float]] = {}
        if self._samples is not None:
            self._samples.clear()

    def squares(self) -> dict[int, list[float]]:
        """Return ``|w_i g_i|^2`` by micro-batch.

        Returns:
            For each micro-batch one number per parameter group; then, with a `metric`, one over all groups
            for each power of Adam's preconditioner; then, with `samples`, the sum over single samples. NaN
            means that a number could not be measured.
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
                row[column] += norm * norm  # not norm**2, which raises OverflowError
        for index, factor, norms in self._per_sample:
            assert self._samples is not None
            norm = self._samples.checked_norm(*(next(on_hosts) for _ in norms))
            self._squares.setdefault(index, [0.0] * columns)[-1] = factor * norm * (factor * norm)
        self._norms, self._per_sample = [], []
        return self._squares

    def state(self) -> dict[int, list[float]]:
        """Return the measurements to save with an open window."""
        return {index: list(each) for index, each in self.squares().items()}

    def load(self, squares: dict[int, list[float]]) -> None:
        """Load the measurements of `state`."""
        self._squares = {index: list(each) for index, each in squares.items()}

    def _take(self) -> list[tuple[Norms | Tensor, ...]]:
        """Return the hooks' measurements since the last call, and clear them."""
        measured = [tuple(slot) for slot in self._slots]
        for slot in self._slots:
            slot.clear()
        return measured

    def _end_of_microbatch(self) -> None:
        if self._last is None:
            return
        index, factor, measured = self._last
        for number, (parts, group) in enumerate(zip(measured, self._groups, strict=True)):
            if not parts:
                continue
            if self._keeps_parts is not None and self._keeps_parts[number]:
                # The norm of a sum cannot be computed from the norms of its parts, so the parts were kept.
                gradient = _sum(parts)
                self._norms.append(
                    (index, group, factor, (_norm(gradient), *self._by_metric(number, gradient)))
                )
                continue
            if len(parts) > 1:
                # Only norms of the parts are left; from the next window on the parts themselves are kept.
                self._in_parts.add(self._parameters[number])
                self.reason = IN_PARTS
            for part in parts:
                assert isinstance(part, tuple)
                self._norms.append((index, group, factor, part))
        if self._samples is not None:
            self._per_sample.append((index, factor, self._samples.end_microbatch()))
        self._last, self._ended = None, index

    def _by_metric(self, number: int, gradient: Tensor) -> Norms:
        return () if self._metric is None else self._metric.norms(number, gradient)

    def _measuring_hook(self, slot: list[Norms | Tensor], number: int) -> Callable[[Tensor], None]:
        parameter, metric = self._parameters[number], self._metric
        dtype = torch.float32 if parameter.dtype in LOW_PRECISION else None
        # On the CPU the norm becomes a float at once. A small tensor that is kept between large ones would
        # fragment the heap, which costs 4 % of the time of a small transformer.
        on_host_at_once = parameter.device.type == "cpu"

        def hook(gradient: Tensor) -> None:
            norm = torch.linalg.vector_norm(values(gradient), dtype=dtype)
            slot.append((norm.item() if on_host_at_once else norm,))

        def by_metric(gradient: Tensor) -> None:
            assert metric is not None
            slot.append((_norm(gradient), *metric.norms(number, gradient)))

        return hook if metric is None else by_metric


def _without_hooks(parameter: Tensor) -> None:
    """Remove an empty dictionary of hooks, which would cost time in each backward."""
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
    """Return numbers and 0-d tensors as floats, with one transfer for each device and dtype.

    Examples:
        >>> on_host([1.0, torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64)])
        [1.0, 2.0, 3.0]
    """
    found = [0.0 if isinstance(norm, Tensor) else norm for norm in norms]
    by_device: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for number, norm in enumerate(norms):
        if isinstance(norm, Tensor):
            by_device.setdefault((norm.device, norm.dtype), []).append((number, norm))
    for tensors in by_device.values():
        # One copy to the host per device, because each copy waits for the device.
        stacked = torch.stack([norm for _, norm in tensors]).tolist()
        for (number, _), value in zip(tensors, stacked, strict=True):
            found[number] = value
    return found
