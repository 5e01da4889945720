"""The micro-batches of one window; those that have not run yet can be split differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.batch.packed import OFFSETS
from superbatch.batch.plan import Plan as BatchPlan
from superbatch.batch.split import TokenBudget, cut, cut_packed, near_equal, packing_of, sizes_of
from superbatch.batch.tree import count_samples
from superbatch.batch.tree import plan as plan_of
from superbatch.errors import InputError, SplitError, WindowError
from superbatch.normalize import Number
from superbatch.window import Window

from ..sizes.auto import AutoSize
from ..sizes.sizing import Fixed
from . import misuse
from .joining import joined
from .sync.sync import Sync

# While the size is unknown, `to_check` returns about FEW micro-batches of at most FEW samples.
FEW = 8
_MOST_SPREAD = 4


Paths = dict[str, tuple[str, ...]]


class MicrobatchList:
    """Micro-batches in order, and the number of samples of each.

    Args:
        microbatches: the micro-batches, in the order in which they run.
        samples: number of samples of each; None if they cannot be counted.
        order: the position in the batch of each sample, micro-batch after micro-batch; None: as in the batch.
        paths: `unsplit` and `per_sample` declarations.
        batch: plan by which the batch may be cut differently; None: it may not.
        source: the batch that the micro-batches were cut from; None if the user passed a `Window`.

    Attributes:
        extra_turns: number of forwards with weight 0 that this rank adds, because another rank has more
            micro-batches.
        stand_in: on a rank without data, the micro-batch to run in those turns; else empty.
        cut_from_one: True if the micro-batches were cut from one batch, so all samples have the same shapes.

    Examples:
        >>> microbatches = MicrobatchList(["abcd", "efg"], [4, 3], None, {"per_sample": ("",)})
        >>> len(microbatches), microbatches.samples
        (2, [4, 3])
    """

    def __init__(
        self,
        microbatches: list[Any],
        samples: list[int] | None,
        order: list[int] | None,
        paths: Paths,
        *,
        batch: BatchPlan | None = None,
        source: Any = None,
    ) -> None:
        self.microbatches = microbatches
        self.samples = samples
        self._order = order
        self.paths = paths
        self._batch = batch
        self._source = source
        self.extra_turns = 0
        self.stand_in: list[Any] = []
        self.cut_from_one = source is not None

    @property
    def runs(self) -> list[Any]:
        """Micro-batches to run on this rank: its own, or the stand-in for a rank without data."""
        return self.microbatches or self.stand_in

    @property
    def can_be_recut(self) -> bool:
        """True if the micro-batches come from one batch that may be cut anywhere."""
        return self._batch is not None

    def __len__(self) -> int:
        return len(self.microbatches)

    def count(self, index: int) -> int:
        """Return the number of samples of a micro-batch, 0 if they cannot be counted."""
        return 0 if self.samples is None else self.samples[index]

    def positions(self, index: int, first: int) -> Sequence[int]:
        """Return the positions of a micro-batch's samples in the effective batch of all ranks.

        Args:
            index: index of the micro-batch.
            first: position of this rank's first sample.
        """
        assert self.samples is not None
        start = sum(self.samples[:index])
        # A stand-in may share positions with other samples, because its gradient is not used.
        stop = start + (self.samples[index] if self.samples else self._stand_in_samples())
        # None is the common case, for which a range needs no list.
        if self._order is None:
            return range(first + start, first + stop)
        return [first + position for position in self._order[start:stop]]

    def to_check(self) -> list[Any]:
        """Return the micro-batches for a check of the loss.

        These are the micro-batches of the window, with two exceptions:

        * while the size is being searched, a few samples each, because it is not yet known what fits;
        * pairs of samples if each micro-batch has only one, which the check could not divide.
        """
        samples = self.samples
        # Micro-batches of a loader, or of a known size, are checked as they are.
        if samples is None or self._source is None or (max(samples) > 1 and self._batch is None):
            return self.microbatches
        take = plan_of(self._source, **self.paths).take
        size = min(FEW, sum(samples)) if max(samples) > 1 else 2
        starts = range(0, sum(samples) - size + 1, size)
        # Spread over the batch: a loader may have sorted it.
        return [take(start, start + size) for start in starts[:: max(1, len(starts) // FEW)]]

    def source_batches(self) -> list[Any]:
        """Return what the user passed: one batch in a list, or the micro-batches of a `Window`."""
        return self.microbatches if self._source is None else [self._source]

    def pick(self, samples: Sequence[int]) -> Any:
        """Return a micro-batch of chosen samples of `source_batches`; None if it cannot be made."""
        try:
            return plan_of(joined(self.source_batches()), **self.paths).take(0, len(samples), order=samples)
        except (SplitError, InputError):  # micro-batches of unequal shapes
            return None

    def first_samples_of_two(self, first: int, second: int, most: int) -> list[int]:
        """Return the indices in `source_batches` of the first `most` samples of each of two micro-batches."""
        return self._first_samples([first, second], most)

    def spread_samples(self, order: Sequence[int]) -> list[int]:
        """Return the indices in `source_batches` of up to four samples, spread over ordered micro-batches."""
        few = min(_MOST_SPREAD, len(order))
        # Evenly spread over the order, with its first and its last micro-batch.
        spread = [order[step * (len(order) - 1) // max(1, few - 1)] for step in range(few)]
        return self._first_samples(spread, max(1, _MOST_SPREAD // few))

    def _stand_in_samples(self) -> int:
        return count_samples(self.stand_in[0], **self.paths)

    def _first_samples(self, indices: Sequence[int], most: int) -> list[int]:
        assert self.samples is not None
        numbers: list[int] = []
        for index in indices:
            start = sum(self.samples[:index])
            numbers += range(start, start + min(most, self.samples[index]))
        # A TokenBudget sorts samples by length; `order` has their positions in the batch.
        ordered = self._order is not None and self._source is not None
        return [self._order[number] for number in numbers] if ordered and self._order else numbers

    def split(self, index: int, most: int) -> int:
        """Cut a micro-batch into near-equal ones of `most` samples or fewer, or raise `SplitError`.

        Returns their number.
        """
        planned = plan_of(self.microbatches[index], **self.paths)
        # Near-equal, because a last micro-batch of one sample would waste a pass.
        sizes = near_equal(planned.samples, most)
        self._replace(index, cut(planned, sizes), sizes)
        return len(sizes)

    def recut(self, index: int, sizes: Sequence[int]) -> None:
        """Cut all micro-batches from `index` on into other sizes."""
        assert self.samples is not None
        assert self._batch is not None
        start, parts = sum(self.samples[:index]), []
        for size in sizes:
            parts.append(self._batch.take(start, start + size))
            start += size
        # Assigned once all are cut, so that a cut that fails halfway loses no samples.
        self.microbatches[index:], self.samples[index:] = parts, list(sizes)

    def recut_as_saved(self, sizes: Sequence[int]) -> None:
        """Cut the micro-batches to the sizes of a saved window.

        Args:
            sizes: number of samples of each micro-batch of the saved window.

        Raises:
            WindowError: the batch has another number of samples, or its micro-batches cannot be cut so.
        """
        # Without counts there is nothing to compare.
        current = self.samples
        if current is None or list(sizes) == current:
            return
        # A batch that was passed as one object can be cut anywhere, so it gets the saved sizes.
        if self._batch is not None and sum(sizes) == sum(current):
            self.recut(0, sizes)
            return
        remaining = list(sizes)
        # From the back, so that indices in front of a cut stay valid.
        for index, samples in reversed(list(enumerate(current))):
            parts: list[int] = []
            while remaining and sum(parts) < samples:
                parts.insert(0, remaining.pop())
            if sum(parts) != samples:
                raise _other_batch(current, sizes)
            # The saved window cut this micro-batch, for example after it ran out of memory.
            if len(parts) > 1:
                planned = plan_of(self.microbatches[index], **self.paths)
                self._replace(index, cut(planned, parts), parts)
        if remaining:
            raise _other_batch(current, sizes)

    def clear(self) -> None:
        """Free the micro-batches, and the batch that they were cut from."""
        self.microbatches, self.stand_in = [], []
        # The plan refers to the batch, so it would keep the data until the next window.
        self._batch = self._source = None

    def _replace(self, index: int, parts: list[Any], sizes: list[int]) -> None:
        self.microbatches[index : index + 1] = parts
        if self.samples is not None:
            self.samples[index : index + 1] = sizes


class CheckedWindow(NamedTuple):
    """Facts of a window for the loss check, after the forward of all of its micro-batches.

    Attributes:
        microbatches: the micro-batches.
        losses: the loss of each micro-batch.
        weights: the weight of each micro-batch; 0 for one that was dropped.
        took_part: returns the indices of the micro-batches whose losses are in the sum.
    """

    microbatches: MicrobatchList
    losses: Sequence[float]
    weights: Sequence[Number]
    took_part: Callable[[], Sequence[int]]


def split_batch(
    batch: Any, sizing: Fixed | AutoSize, paths: Paths, sync: Sync, *, need_samples: bool
) -> MicrobatchList:
    """Cut a batch into micro-batches; those of a `Window` are taken as they are.

    Args:
        batch: a batch, or a Window.
        sizing: chooses the sizes of micro-batches.
        paths: `unsplit` and `per_sample` declarations.
        sync: the ranks that share a batch; if their forwards communicate, they agree on a size.
        need_samples: whether samples must be counted.

    Raises:
        SplitError: the batch cannot be split, or its samples cannot be counted although they must be.

    Examples:
        >>> import torch
        >>> from superbatch.torch.window.sync.local import Local
        >>> split_batch((torch.zeros(5, 2),), Fixed(2), {}, Local(), need_samples=True).samples
        [2, 2, 1]
    """
    if not isinstance(sizing, Fixed):
        # `ByMicrobatch.cut` passes a Fixed sizing for a Window, which has its loader's sizes.
        assert not isinstance(batch, Window)
        planned = plan_of(batch, **paths)
        sizes = sizing.plan(batch, planned.samples, sync.agree_size if sync.has_collective_forwards else None)
        # With collective forwards the ranks must keep equal numbers of micro-batches: no rank may cut again.
        recut = None if sync.has_collective_forwards else planned
        return MicrobatchList(cut(planned, sizes), sizes, None, paths, batch=recut, source=batch)
    # `most_samples` is set once a window with more samples has run out of memory.
    size, most = sizing.size, sizing.most_samples if sizing.learns else None
    if most is not None and isinstance(size, int):
        size = min(size, most)
    source = None if isinstance(batch, Window) else batch
    microbatches = MicrobatchList(
        *microbatches_of(batch, size, paths, need_samples=need_samples), paths, source=source
    )
    if most is not None and microbatches.samples is not None:
        cut_large(microbatches, 0, most)
    return microbatches


def cut_large(microbatches: MicrobatchList, start: int, most: int) -> None:
    """Cut each micro-batch from index `start` on that has more than `most` samples, or raise `SplitError`."""
    assert microbatches.samples is not None
    # From the back, so that indices in front of a cut stay valid.
    for index in range(len(microbatches) - 1, start - 1, -1):
        if microbatches.samples[index] > most:
            microbatches.split(index, most)


def _other_batch(current: Sequence[int], saved: Sequence[int]) -> WindowError:
    return WindowError(
        f"The micro-batches of this window have {list(current)} samples, but those of the saved window have "
        f"{list(saved)}. Pass the batch and micro-batches of the saved window, or call discard() first."
    )


def microbatches_of(
    batch: Any, microbatch_size: int | TokenBudget | None, paths: Paths, *, need_samples: bool
) -> tuple[list[Any], list[int] | None, list[int] | None]:
    """Return the micro-batches, the number of samples of each, and the order of the samples.

    The order lists each sample's position in the batch, micro-batch after micro-batch; None: as in the batch.

    Args:
        batch: a batch to split, or a Window to take as it is.
        microbatch_size: samples per micro-batch at most, a TokenBudget, or None for one micro-batch.
        paths: `unsplit` and `per_sample` declarations.
        need_samples: whether samples must be counted; if not, None may be returned in place of their numbers.

    Raises:
        SplitError: the batch cannot be split, or its samples cannot be counted although they must be.
        InputError: a Window has no micro-batches, or the lengths that a TokenBudget needs are missing or
            wrong.

    Examples:
        >>> import torch
        >>> microbatches, counts, order = microbatches_of((torch.zeros(5, 2),), 2, {}, need_samples=True)
        >>> counts, order, microbatches[2][0].shape
        ([2, 2, 1], None, torch.Size([1, 2]))
    """
    if not isinstance(batch, Window) and microbatch_size is not None:
        # The common case first, because it needs no walk through the batch.
        if isinstance(microbatch_size, int) and not any(paths.values()):
            length = _length_of_tensors(batch)
            if length:
                counts = sizes_of(length, microbatch_size)
                return _split_tensors(batch, counts), counts, None
        trim = microbatch_size.trim if isinstance(microbatch_size, TokenBudget) else ()
        planned = plan_of(batch, **paths, trim=trim)
        packing = packing_of(batch, planned.samples, microbatch_size)
        return cut_packed(planned, packing), packing.sizes, packing.order
    microbatches = list(batch) if isinstance(batch, Window) else [batch]
    if not microbatches:
        raise misuse.empty_window()
    # Without declared paths, the length of each tensor is the number of samples.
    if not any(paths.values()):
        lengths = [_length_of_tensors(microbatch) for microbatch in microbatches]
        if all(lengths):
            return microbatches, lengths, None
    try:
        return microbatches, [count_samples(microbatch, **paths) for microbatch in microbatches], None
    except SplitError:
        if need_samples:
            raise
        return microbatches, None, None


def _length_of_tensors(batch: Any) -> int:
    """Return the number of samples of a tuple, list or dict of equally long tensors; 0 for any other batch.

    The general walk takes 1 % of the window of a tiny model, and this shortcut a tenth of that.
    """
    kind = type(batch)
    if not (kind is tuple or kind is list or (kind is dict and OFFSETS.isdisjoint(batch))):
        return 0
    length = 0
    for tensor in batch.values() if kind is dict else batch:
        # Sparse, mkldnn and nested tensors cannot be sliced; `plan` raises for them.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return 0
        shape = tensor.shape  # `len(tensor)` takes four times as long
        if not shape or not shape[0] or (length and shape[0] != length):
            return 0
        length = shape[0]
    return length


def _split_tensors(batch: Any, counts: list[int]) -> list[Any]:
    leaves = batch.values() if type(batch) is dict else batch
    # split_with_sizes returns all views in one call.
    parts = zip(*[tensor.split_with_sizes(counts) for tensor in leaves], strict=True)
    if type(batch) is tuple:
        return list(parts)
    return [list(part) if type(batch) is list else dict(zip(batch, part, strict=True)) for part in parts]
