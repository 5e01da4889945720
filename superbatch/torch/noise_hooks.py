"""What each micro-batch's own gradient measures, seen on its way into the sum.

A hook on a leaf sees what autograd is about to add to ``.grad`` (a hook after the addition would see the
running sum): no second backward, and no copy of the gradient beyond small parameters'.

* Small gradients are kept till some are there, and measured together: that many calls would take longer than
  the numbers in them.
* Large ones are measured at once, and not kept. One that comes in several parts (a reentrant checkpoint, or
  two losses of one micro-batch) cannot be measured like that: from the next window on its parts are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from .gradients import LOW_PRECISION, Gradients, Owned, values
from .in_grad import InGrad

KEPT_BYTES = 1 << 20
"""So many bytes of small gradients are kept at most, over some micro-batches."""

SMALL_BYTES = 1 << 17
"""Below, a gradient is small."""


class Layout:
    """Which gradients are kept, and which belong together.

    Args:
        owned: the parameters.
        groups: the parameter group of each, as a number.
        parts: parameters whose gradients are known to come in parts.
    """

    def __init__(self, owned: Sequence[Owned], groups: Sequence[int], parts: set[Tensor]) -> None:
        self.parameters = [entry.parameter for entry in owned]
        self.groups = list(groups)
        self.kept = [p.nbytes < SMALL_BYTES or p in parts for p in self.parameters]
        small = [p.nbytes for p, kept in zip(self.parameters, self.kept, strict=True) if kept]
        self.bytes = sum(small)
        buckets: dict[Any, list[int]] = {}
        for place, (parameter, kept) in enumerate(zip(self.parameters, self.kept, strict=True)):
            if kept:
                buckets.setdefault((groups[place], parameter.device, parameter.dtype), []).append(place)
        self.buckets = [(key[0], places) for key, places in buckets.items()]
        self.large = [place for place, kept in enumerate(self.kept) if not kept]


class _Row(NamedTuple):
    """What came of the backward of one micro-batch.

    Attributes:
        microbatch: its position.
        factor: that its gradient has yet to be multiplied by.
        parts: for each parameter its gradient, in as many parts as it came.
    """

    microbatch: int
    factor: float
    parts: list[tuple[Tensor, ...]]


class SeenGradients:
    """``|w_i g_i|^2`` of the micro-batches of one window, per parameter group.

    Args:
        layout: of the parameters.
        parts: where parameters are noted whose gradients come in parts.
    """

    def __init__(self, layout: Layout, parts: set[Tensor]) -> None:
        self._layout = layout
        self._parts = parts
        self._slots: list[list[Tensor]] = [[] for _ in layout.parameters]
        self._undo: list[Callable[[], None]] = []
        self._norms: list[tuple[int, int, float, Tensor]] = []  # micro-batch, group, factor, norm
        self.restart()
        self.reason: str | None = None

    def open(self) -> None:
        """Put the hooks on."""
        for parameter, slot, kept in zip(
            self._layout.parameters, self._slots, self._layout.kept, strict=True
        ):
            had_none = parameter._backward_hooks is None
            # Of C, as it is called for each parameter and micro-batch.
            handle = parameter.register_hook(slot.append if kept else _measuring(slot))
            self._undo.append(_taking_off(parameter, handle.remove, had_none=had_none))

    def close(self) -> None:
        """Take the hooks off again: a model is left as it was given."""
        while self._undo:
            self._undo.pop()()
        for slot in self._slots:
            slot.clear()
        self.restart()

    def backward(
        self, place: Gradients, index: int, loss: Tensor, factor: float, *, retain_graph: bool
    ) -> None:
        """Add to the sum as ``place.backward`` does, and measure what is added.

        Args:
            place: where gradients are summed.
            index: of the micro-batch.
            loss: of the micro-batch.
            factor: that its gradient is summed with.
            retain_graph: as in PyTorch.
        """
        for slot in self._slots:  # of a gradient that the user's own forward has asked for
            slot.clear()
        place.backward(loss, factor, retain_graph=retain_graph)
        parts = [tuple(slot) for slot in self._slots]
        for slot in self._slots:
            slot.clear()
        if self._last is not None and self._last.microbatch == index:  # another loss of the same micro-batch
            parts = [old + new for old, new in zip(self._last.parts, parts, strict=True)]
        else:
            self._end_of_microbatch()
            if index == self._ended:
                self.reason = "it was saved between two losses of one micro-batch"
        self._last = _Row(index, 1.0 if isinstance(place, InGrad) else factor, parts)

    def forget(self, index: int) -> None:
        """Forget the last micro-batch, if it was this: it is left out, or will be run again."""
        if self._last is not None and self._last.microbatch == index:
            self._last = None

    def restart(self) -> None:
        """Forget all: the window begins again."""
        self._last: _Row | None = None
        self._ended: int | None = None
        self._rows: list[tuple[int, float, list[list[Tensor]]]] = []
        self._norms.clear()
        self._squares: dict[int, list[float]] = {}

    def squares(self) -> dict[int, list[float]]:
        """Return ``|w_i g_i|^2`` by micro-batch, one number per parameter group, as they were summed."""
        self._end_of_microbatch()
        self._measure_kept()
        values_ = _on_host([norm for *_, norm in self._norms])
        count = max(self._layout.groups, default=0) + 1
        for (index, group, factor, _), value in zip(self._norms, values_, strict=True):
            self._squares.setdefault(index, [0.0] * count)[group] += (factor * value) ** 2
        self._norms.clear()
        return self._squares

    def state(self) -> dict[int, list[float]]:
        """Return what is to be saved of a window in flight."""
        return {index: list(each) for index, each in self.squares().items()}

    def load(self, squares: dict[int, list[float]]) -> None:
        """Go on from what `state` returned."""
        self._squares = {index: list(each) for index, each in squares.items()}

    def _end_of_microbatch(self) -> None:
        last, layout = self._last, self._layout
        if last is None:
            return
        for place in layout.large:
            norms = last.parts[place]
            if len(norms) > 1:
                self._parts.add(layout.parameters[place])
                self.reason = "a large gradient came in parts, which are put together from the next window on"
            self._norms += [(last.microbatch, layout.groups[place], last.factor, norm) for norm in norms]
        self._rows.append((last.microbatch, last.factor, [_whole(last.parts, b) for _, b in layout.buckets]))
        self._last, self._ended = None, last.microbatch
        if len(self._rows) * layout.bytes >= KEPT_BYTES:
            self._measure_kept()

    def _measure_kept(self) -> None:
        rows = self._rows
        for number, (group, _) in enumerate(self._layout.buckets):
            tensors = [tensor for *_, buckets in rows for tensor in buckets[number]]
            if not tensors:
                continue
            sizes = [sum(tensor.numel() for tensor in buckets[number]) for *_, buckets in rows]
            # One by one, for the rounding must not depend on how many were kept.
            parts = _flatten_dense_tensors(tensors).split(sizes)
            self._norms += [
                (index, group, factor, _norm(part))
                for (index, factor, _), part, size in zip(rows, parts, sizes, strict=True)
                if size
            ]
        self._rows = []


def _measuring(slot: list[Tensor]) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        slot.append(_norm(values(gradient)))

    return hook


def _taking_off(parameter: Tensor, remove: Callable[[], None], *, had_none: bool) -> Callable[[], None]:
    def take_off() -> None:
        remove()
        if had_none and not parameter._backward_hooks:
            parameter._backward_hooks = None  # an empty dictionary would be called in each backward

    return take_off


def _whole(parts: list[tuple[Tensor, ...]], places: list[int]) -> list[Tensor]:
    """The gradients of some parameters, each put together, as real numbers in dense tensors."""
    return [_real(parts[place]) for place in places if parts[place]]


def _real(parts: tuple[Tensor, ...]) -> Tensor:
    gradient = parts[0]
    for part in parts[1:]:
        gradient = gradient + part
    gradient = values(gradient)
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _norm(tensor: Tensor) -> Tensor:
    """The 2-norm: squares would overflow, or vanish, where norms do not."""
    dtype = torch.float32 if tensor.dtype in LOW_PRECISION else None
    return torch.linalg.vector_norm(tensor, dtype=dtype)


def _on_host(norms: list[Tensor]) -> list[float]:
    """The values of 0-d tensors, by one transfer for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, norm in enumerate(norms):
        by_device.setdefault(norm.device, []).append(place)
    found = [0.0] * len(norms)
    for places in by_device.values():
        dtype = max((norms[place].dtype for place in places), key=lambda each: each.itemsize)
        stacked = torch.stack([norms[place].to(dtype) for place in places])
        for place, value in zip(places, stacked.tolist(), strict=True):
            found[place] = value
    return found
