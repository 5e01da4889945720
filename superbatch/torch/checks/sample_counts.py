"""Counts of each sample that a loss may divide by: labels, masks, sample weights, list lengths.

A mean over tokens and a mean over samples have the same gradient as long as every sample has equally many
tokens. A wrong weight shows only on samples that count unequally; they are found and picked here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.batch.containers import array_shape
from superbatch.batch.tree import get, leaves

_IGNORED = (-100, -1, 0)  # labels that losses leave out
_OF_IMAGES = 255  # and in maps of labels
_SMALL = 1 << 12  # elements of a leaf for which a call of an operation costs more than its work
_BY_CHANCE = 1e-3  # labels at the end of a row that are as likely alike do not pad it


class Hints(NamedTuple):
    """Hints about labels from a loss function.

    Attributes:
        ignored: labels that its loss modules leave out.
        class_weights: those that it reaches.
    """

    ignored: tuple[int, ...] = ()
    class_weights: tuple[tuple[float, ...], ...] = ()


class Count(NamedTuple):
    """A number per sample that the loss may be a mean over.

    Attributes:
        path: of the leaf.
        ignored: the label that is not counted; None: the leaf is summed, or its entries are counted.
        per_class: weights of labels, to be summed.
        unpadded: the share of a row without the entries at an end that are all alike.
    """

    path: str
    ignored: int | None
    per_class: tuple[float, ...] = ()
    unpadded: bool = False

    def __str__(self) -> str:
        if self.per_class:
            return f"{self.path!r} (weights of classes {list(self.per_class[:8])})"
        if self.unpadded:
            return f"{self.path!r} (without its ends)"
        return repr(self.path) if self.ignored is None else f"{self.path!r} (without {self.ignored})"

    def of(self, parts: Sequence[Any]) -> Tensor | None:
        """Return the counts of all samples of some micro-batches; None where they cannot be counted.

        Examples:
            >>> Count("labels", -100).of([{"labels": torch.tensor([[1, 2], [3, -100]])}])
            tensor([2., 1.], dtype=torch.float64)
        """
        return self.of_values(_values(parts, self.path))

    def of_values(self, values: Sequence[Any]) -> Tensor | None:
        """Return the result of `of`, from the leaf of each micro-batch."""
        try:
            counts = [self._count(value) for value in values]
        except RuntimeError:  # a dtype that is not compared or summed
            return None
        known = [count for count in counts if count is not None]
        if not known or len(known) < len(counts):
            return None
        # [samples of all micro-batches], in float64 on the host.
        return torch.cat(known)

    def of_first(self, part: Any) -> float | None:
        """Return the count of a micro-batch's first sample; None without a count, or for one of chance."""
        value = _value(part, self.path)
        # 0 is a label like the others, unless it fills the ends of rows.
        if self.ignored == 0 and not (_has_ends(value) and _pads([value])):
            return None
        try:
            counts = self._count(value[:1])
        except (TypeError, RuntimeError):
            return None
        return None if counts is None else float(counts[0])

    def _count(self, value: Any) -> Tensor | None:
        if self.per_class:
            return _weighed(value, self.per_class)
        return _unpadded(value) if self.unpadded else _counted(value, self.ignored)


def counts_in(
    part: Any,
    *,
    unsplit: Collection[str] = (),
    per_sample: Collection[str] = (),
    hints: Hints = Hints(),  # noqa: B008  (immutable)
) -> list[Count]:
    """List the counts that a micro-batch has.

    Args:
        part: a micro-batch, or a batch.
        unsplit: paths that are kept whole.
        per_sample: paths of lists with one entry for each sample.
        hints: from the loss function, about labels.

    Examples:
        >>> found = counts_in({"x": -torch.rand(2, 3), "mask": torch.ones(2, 3), "y": torch.tensor([1, 2])})
        >>> [str(count) for count in found]
        ["'mask'", "'y' (without -100)", "'y' (without -1)", "'y' (without 0)", "'y'"]
    """
    found: list[Count] = []
    with contextlib.suppress(ValueError, TypeError, RuntimeError):  # a batch without known leaves
        for leaf in leaves(part, unsplit=unsplit, per_sample=per_sample):
            if leaf.length is not None:
                found += _of_leaf(leaf.path, _value(part, leaf.path), hints)
    return found


class Uneven(NamedTuple):
    """A count that is not the same for all samples.

    Attributes:
        kind: the count.
        values: of the samples.
        likely: whether a loss may well divide by it: 0 is a label like the others, unless it pads rows.
    """

    kind: Count
    values: Tensor
    likely: bool


def uneven(counts: Sequence[Count], parts: Sequence[Any], *, unlikely: bool = True) -> Iterator[Uneven]:
    """Yield the counts that are not the same for all samples.

    Every window calls it, so the cheapest tests come first: the smallest label is read once, and mostly is
    larger than any label that may be ignored.

    Args:
        counts: those to read; of one leaf after the other.
        parts: micro-batches.
        unlikely: also those that are not likely.

    Examples:
        >>> labels = torch.tensor([[0, 5], [3, 4]])
        >>> [found.likely for found in uneven([Count("", -100), Count("", 0)], [labels])]
        [False]
        >>> list(uneven([Count("", 0)], [labels], unlikely=False))
        []
    """
    leaf: _Leaf | None = None
    for count in counts:
        if leaf is None or leaf.path != count.path:
            leaf = _Leaf(parts, count.path)
        if not leaf.may_tell_apart(count):
            continue
        likely = count.ignored != 0 or (leaf.has_ends() and _pads(leaf.values))
        if not (likely or unlikely):
            continue
        found = count.of_values(leaf.values)
        if found is not None and bool((found != found[0]).any()):
            yield Uneven(count, found, likely)


class _Leaf:
    """A leaf of some micro-batches, with values that several counts share."""

    def __init__(self, parts: Sequence[Any], path: str) -> None:
        self.path = path
        self.values = _values(parts, path)
        self._low: float | None = None
        self._has_ends: bool | None = None

    def may_tell_apart(self, count: Count) -> bool:
        """Return whether a count may differ between samples."""
        if count.unpadded:
            return self.has_ends()
        if count.ignored is None and not count.per_class:
            return True
        low = self._low
        if low is None:
            low = min((each.min().item() for each in self.values if _is_plain(each)), default=math.inf)
            self._low = low
        if count.ignored is not None and count.ignored < low:  # mostly: no second look
            return False
        # With one label alone, every sample has the same count of it.
        high = max((each.max().item() for each in self.values if _is_plain(each)), default=math.inf)
        return low < high and (count.ignored is None or count.ignored <= high)

    def has_ends(self) -> bool:
        """Return whether some row begins or ends with two entries that are alike."""
        if self._has_ends is None:
            self._has_ends = any(map(_has_ends, self.values))
        return self._has_ends


def contrast(counts: Tensor) -> float:
    """Return the relative difference of the mean counts before and behind the check's cut, at a third.

    Examples:
        >>> contrast(torch.tensor([2.0, 4.0, 4.0]))
        0.5
    """
    # A third, rounded up, as `orders` cuts.
    cut = -(-len(counts) // 3)
    if not 0 < cut < len(counts):
        return 0.0
    first, rest = float(counts[:cut].mean()), float(counts[cut:].mean())
    return abs(first - rest) / max(first, rest) if max(first, rest) > 0 else 0.0


def spread(counts: Tensor) -> float:
    """Return the `contrast` of the two samples that `extremes` picks.

    Examples:
        >>> spread(torch.tensor([2.0, 0.0, 4.0])), spread(torch.tensor([0.0, 4.0]))
        (0.5, 1.0)
    """
    low, high = (float(end) for end in counts.aminmax())
    if low <= 0 < high:
        # The smallest that counts at all, which `extremes` picks too.
        least = float(counts[counts > 0].min())
        low = least if least < high else low
    return (high - low) / high if high > 0 else 0.0


def extremes(counts: Tensor, rows: int) -> list[int]:
    """Return the samples that count least and most, in increasing order, so that every cut separates them.

    Samples that count nothing are left out where others differ: a mean over nothing is not a number.

    Examples:
        >>> extremes(torch.tensor([3.0, 1.0, 0.0, 2.0, 9.0]), 2)
        [1, 4]
    """
    values = counts.tolist()
    order = sorted(range(len(values)), key=values.__getitem__)
    some = [place for place in order if values[place] > 0]
    if some and values[some[0]] < values[some[-1]]:
        order = some
    rows = min(rows, len(order))
    return [*order[: rows // 2], *order[len(order) - (rows - rows // 2) :]]


def _value(part: Any, path: str) -> Any:
    try:
        value = get(part, path)
    except (ValueError, LookupError):
        return None
    if isinstance(value, Tensor) or array_shape(value) is None:
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _of_leaf(path: str, value: Any, hints: Hints) -> list[Count]:
    ignored = _ignored_in(value)
    found = [Count(path, label) for label in ignored]
    if None in ignored or not ignored:
        return found
    known = [label for label in hints.ignored if label not in ignored]
    found += [Count(path, label) for label in known]
    found += [Count(path, None, per_class) for per_class in hints.class_weights]
    if value.ndim == 1:  # lengths
        found.append(Count(path, None))
    elif value.ndim == 2 and value.shape[1] > 2:
        found.append(Count(path, None, unpadded=True))
    return found


def _ignored_in(value: Any) -> Sequence[int | None]:
    """The labels that may be ignored in a leaf; (None,) for one that is summed, () for one to leave alone."""
    if isinstance(value, list | tuple):
        return (None,) if value and all(_entries(one) is not None for one in value) else ()
    if not _is_plain(value):
        return ()
    if value.dtype == torch.bool:
        return (None,)
    if value.is_floating_point():
        low, high = (float(end) for end in value.detach().aminmax())
        # One float for each sample may be its weight; several are counted only where they are a mask.
        alone = value.numel() == len(value)
        return (None,) if low >= 0 and (alone or low == high or _is_binary(value)) else ()
    if value.dtype == torch.uint8 and value.ndim > 3:  # images
        return ()
    return (*_IGNORED, _OF_IMAGES) if value.ndim > 2 else _IGNORED


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.ndim > 0
        and value.numel() > 0
        and not value.is_complex()
        and value.device.type != "meta"
    )


def _pads(values: Sequence[Any]) -> bool:
    """Return whether 0 stands at the ends of rows alone, and more than once in some row."""
    if not all(_is_plain(value) and value.ndim > 1 for value in values):
        return False
    kept = [value.flatten(1) != 0 for value in values]
    # Zeros stay zeros up to the end of the row.
    if not all(bool((row[:, 1:] <= row[:, :-1]).all()) for row in kept):
        return False
    # Two zeros at the end of a row: a single one may be a label.
    return not all(bool(row[:, -2:].any(1).all()) for row in kept)


def _has_ends(value: Any) -> bool:
    if not _is_plain(value) or value.ndim < 2:
        return False
    rows = value if value.ndim == 2 else value.flatten(1)
    pairs = rows[:, :2].tolist() + rows[:, -2:].tolist()
    return rows.shape[1] > 1 and any([first == second for first, second in pairs])  # noqa: C419  (one call)


def _is_binary(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _counted(value: Any, ignored: int | None) -> Tensor | None:
    if isinstance(value, list | tuple):
        numbers = [_entries(one) for one in value]
        known = [number for number in numbers if number is not None]
        return torch.tensor(known, dtype=torch.float64) if len(known) == len(numbers) else None
    if not _is_plain(value):
        return None
    value = value.detach()
    value = value if ignored is None else value != ignored
    return value.reshape(len(value), -1).sum(1).cpu().double()


def _entries(one: Any) -> float | None:
    """Return the count of one entry of a list: the rows of its first array."""
    if isinstance(one, Mapping):
        return next((found for inner in one.values() if (found := _entries(inner)) is not None), None)
    shape = array_shape(one)
    return None if not shape else float(shape[0])


def _weighed(value: Any, per_class: Sequence[float]) -> Tensor | None:
    """The summed weights of each sample's labels; labels that have none count nothing."""
    if not _is_plain(value):
        return None
    labels = value.detach().reshape(len(value), -1).long().cpu()
    known = (labels >= 0) & (labels < len(per_class))
    weights = torch.tensor(per_class, dtype=torch.float64)
    # The clamp keeps the lookup in range; `known` then clears labels without a weight.
    return (weights[labels.clamp(0, len(per_class) - 1)] * known).sum(1)


def _unpadded(value: Any) -> Tensor | None:
    """The share of each row without the entries at its end, or at its start, that are all the same."""
    if not _is_plain(value) or value.ndim != 2 or value.shape[1] < 3:
        return None
    value, width = value.detach(), value.shape[1]
    first, last = value[:, :1], value[:, -1:]
    behind = (value != last).flip(1).int().argmax(1)  # 0 where all are the same: nothing is known of them
    before = (value != first).int().argmax(1)
    most = torch.maximum(behind, before)
    low, high = value.aminmax()  # padding has its own label: the smallest or the largest
    pads = torch.where(behind > before, last[:, 0], first[:, 0])
    chance = (float(high) - float(low) + 1) ** (1.0 - most)  # of that many alike labels in a row
    padded = (chance < _BY_CHANCE) & ((pads == low) | (pads == high))
    return 1 - torch.where(padded, most, 0).cpu().double() / width


def _values(parts: Sequence[Any], path: str) -> list[Any]:
    """The leaf of each micro-batch; of many small tensors of one shape, one tensor with all samples."""
    try:  # mostly of tensors alone: without a call of ours for each micro-batch
        key = int(path) if type(parts[0]) is tuple else path
        values: list[Any] = list(map(itemgetter(key), parts)) if path else list(parts)
        if len({value.shape[1:] for value in values}) == 1 and values[0].numel() <= _SMALL:
            return [torch.cat(values)]
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        pass
    return [_value(part, path) for part in parts]
