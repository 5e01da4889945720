"""Counts per sample that a loss may divide by: labels, masks, sample weights, lengths of lists.

While all samples have equally many tokens, a mean over tokens equals a mean over samples, and a wrong weight
has no effect. This file finds the samples with unequal counts.
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

from .cuts import first_part

_IGNORED = (-100, -1, 0)  # labels that losses ignore
_OF_IMAGES = 255  # label that losses ignore in label maps of images
_SMALL = 1 << 12  # elements: below, the overhead of an operation exceeds its work
_BY_CHANCE = 1e-3  # equal labels at the end of a row are padding if they are less likely than this by chance


class Hints(NamedTuple):
    """Labels that the modules of a loss function ignore, and class weights that it can reach."""

    ignored: tuple[int, ...] = ()
    class_weights: tuple[tuple[float, ...], ...] = ()


class Count(NamedTuple):
    """Number per sample that the loss may divide by.

    Attributes:
        path: path of the leaf.
        ignored: label that is not counted; None: the leaf is summed, or its entries are counted.
        per_class: class weights, summed over the labels of a sample.
        unpadded: count the share of a row that is no padding; padding is equal entries at one of its ends.
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
        """Return the counts of all samples of some micro-batches; None if they cannot be counted.

        Examples:
            >>> Count("labels", -100).of([{"labels": torch.tensor([[1, 2], [3, -100]])}])
            tensor([2., 1.], dtype=torch.float64)
        """
        return self.of_values(_values(parts, self.path))

    def of_values(self, values: Sequence[Any]) -> Tensor | None:
        """Return the counts of all samples as `of` does, from the leaf of each micro-batch."""
        try:
            counts = [self._count(value) for value in values]
        except RuntimeError:  # torch cannot compare or sum this dtype
            return None
        known = [count for count in counts if count is not None]
        if not known or len(known) < len(counts):
            return None
        # [samples of all micro-batches], in float64 on the host.
        return torch.cat(known)

    def of_first(self, part: Any) -> float | None:
        """Return the count of a micro-batch's first sample; None without one, or if it differs by chance."""
        value = _value(part, self.path)
        # 0 is an ordinary label, unless it fills the ends of rows.
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
    """Return the counts that the leaves of a micro-batch offer.

    Args:
        part: a micro-batch, or a batch.
        unsplit: paths of leaves that every micro-batch gets in full.
        per_sample: paths of lists with one entry for each sample.
        hints: labels to ignore and class weights of the loss function.

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
    """Count with different values for some samples.

    Attributes:
        kind: the count.
        values: value for each sample.
        likely: a loss is likely to divide by it. False for the count of nonzero labels, unless 0 pads rows.
    """

    kind: Count
    values: Tensor
    likely: bool


def uneven(counts: Sequence[Count], parts: Sequence[Any], *, unlikely: bool = True) -> Iterator[Uneven]:
    """Yield the counts with different values for some samples; the `counts` are grouped by leaf.

    Every window calls this, so the cheapest test comes first: the smallest label of a leaf is read once, and
    is mostly larger than any label to ignore. With `unlikely`, counts are included that a loss is unlikely to
    divide by.

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
    """Leaf of some micro-batches, with cached properties that several counts need."""

    def __init__(self, parts: Sequence[Any], path: str) -> None:
        self.path = path
        self.values = _values(parts, path)
        self._low: float | None = None
        self._has_ends: bool | None = None

    def may_tell_apart(self, count: Count) -> bool:
        """Return False if a count is certainly equal for all samples; else True."""
        if count.unpadded:
            return self.has_ends()
        if count.ignored is None and not count.per_class:
            return True
        low = self._low
        if low is None:
            low = min((each.min().item() for each in self.values if _is_plain(each)), default=math.inf)
            self._low = low
        if count.ignored is not None and count.ignored < low:  # the usual case: that label does not occur
            return False
        # If all labels are equal, every sample has the same count.
        high = max((each.max().item() for each in self.values if _is_plain(each)), default=math.inf)
        return low < high and (count.ignored is None or count.ignored <= high)

    def has_ends(self) -> bool:
        """Return whether some row begins or ends with two equal entries."""
        if self._has_ends is None:
            self._has_ends = any(map(_has_ends, self.values))
        return self._has_ends


def contrast_of_cut(counts: Tensor) -> float:
    """Return the relative difference of the mean counts of the first third of the samples and of the rest.

    Examples:
        >>> contrast_of_cut(torch.tensor([2.0, 4.0, 4.0]))
        0.5
    """
    cut = first_part(len(counts))
    if not 0 < cut < len(counts):
        return 0.0
    first, rest = float(counts[:cut].mean()), float(counts[cut:].mean())
    return abs(first - rest) / max(first, rest) if max(first, rest) > 0 else 0.0


def contrast_of_extremes(counts: Tensor) -> float:
    """Return the `contrast_of_cut` of the two samples that `extremes` picks.

    Examples:
        >>> [contrast_of_extremes(torch.tensor(counts)) for counts in ([2.0, 0.0, 4.0], [0.0, 4.0])]
        [0.5, 1.0]
    """
    low, high = (float(end) for end in counts.aminmax())
    if low <= 0 < high:
        # The smallest positive count: `extremes` picks it too.
        least = float(counts[counts > 0].min())
        low = least if least < high else low
    return (high - low) / high if high > 0 else 0.0


def extremes(counts: Tensor, rows: int) -> list[int]:
    """Return the samples with the smallest counts, then those with the largest, so that a cut separates them.

    Samples with count 0 are left out if the others differ: a mean over nothing is NaN.

    Examples:
        >>> extremes(torch.tensor([3.0, 1.0, 0.0, 2.0, 9.0]), 2)
        [1, 4]
    """
    values = counts.tolist()
    order = sorted(range(len(values)), key=values.__getitem__)
    some = [sample for sample in order if values[sample] > 0]
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
    declared = [label for label in hints.ignored if label not in ignored]
    found += [Count(path, label) for label in declared]
    found += [Count(path, None, per_class) for per_class in hints.class_weights]
    if value.ndim == 1:  # lengths
        found.append(Count(path, None))
    elif value.ndim == 2 and value.shape[1] > 2:
        found.append(Count(path, None, unpadded=True))
    return found


def _ignored_in(value: Any) -> Sequence[int | None]:
    """Return the labels that a loss may ignore in a leaf; (None,) to sum the leaf, () to skip it."""
    if isinstance(value, list | tuple):
        return (None,) if value and all(_entries(one) is not None for one in value) else ()
    if not _is_plain(value):
        return ()
    if value.dtype == torch.bool:
        return (None,)
    if value.is_floating_point():
        low, high = (float(end) for end in value.detach().aminmax())
        # One float per sample may be its weight; several are counted only if they are a mask.
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
    """Return whether 0 occurs at the ends of rows only, and more than once in some row."""
    if not all(_is_plain(value) and value.ndim > 1 for value in values):
        return False
    nonzero = [value.flatten(1) != 0 for value in values]
    # After the first zero, a row has zeros only.
    if not all(bool((row[:, 1:] <= row[:, :-1]).all()) for row in nonzero):
        return False
    # At least two zeros at the end of a row, because a single one may be a label.
    return not all(bool(row[:, -2:].any(1).all()) for row in nonzero)


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
    """Return the count of one entry of a list: the number of rows of its first array."""
    if isinstance(one, Mapping):
        return next((found for inner in one.values() if (found := _entries(inner)) is not None), None)
    shape = array_shape(one)
    return None if not shape else float(shape[0])


def _weighed(value: Any, per_class: Sequence[float]) -> Tensor | None:
    """Return the sum of the class weights of each sample's labels; a label without a weight counts 0."""
    if not _is_plain(value):
        return None
    labels = value.detach().reshape(len(value), -1).long().cpu()
    weighted = (labels >= 0) & (labels < len(per_class))
    weights = torch.tensor(per_class, dtype=torch.float64)
    # The clamp keeps the lookup in range; `weighted` then sets labels without a weight to 0.
    return (weights[labels.clamp(0, len(per_class) - 1)] * weighted).sum(1)


def _unpadded(value: Any) -> Tensor | None:
    """Return the share of each row that is no padding: equal entries at its end, or at its start."""
    if not _is_plain(value) or value.ndim != 2 or value.shape[1] < 3:
        return None
    value, width = value.detach(), value.shape[1]
    first, last = value[:, :1], value[:, -1:]
    behind = (value != last).flip(1).int().argmax(1)  # 0 if all are equal: padding unknown
    before = (value != first).int().argmax(1)
    most = torch.maximum(behind, before)
    low, high = value.aminmax()  # padding mostly has a label of its own: the smallest or the largest
    pads = torch.where(behind > before, last[:, 0], first[:, 0])
    chance = (float(high) - float(low) + 1) ** (1.0 - most)  # probability of a run of this length
    padded = (chance < _BY_CHANCE) & ((pads == low) | (pads == high))
    return 1 - torch.where(padded, most, 0).cpu().double() / width


def _values(parts: Sequence[Any], path: str) -> list[Any]:
    """Return the leaf of each micro-batch; many small tensors of one shape become one tensor."""
    try:  # fast path, mostly taken: one C call for all micro-batches
        key = int(path) if type(parts[0]) is tuple else path
        values: list[Any] = list(map(itemgetter(key), parts)) if path else list(parts)
        if len({value.shape[1:] for value in values}) == 1 and values[0].numel() <= _SMALL:
            return [torch.cat(values)]
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        pass
    return [_value(part, path) for part in parts]
