"""Numbers that a loss may divide by, counted for each sample: labels, masks, sample weights, list lengths.

A mean over tokens and a mean over samples have the same gradient as long as every sample has equally many
tokens. A wrong weight shows only on samples that count unequally: here they are counted and picked.
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
_BY_CHANCE = 1e-3  # labels at the end of a row that are as likely alike do not pad it


class Hints(NamedTuple):
    """What a loss function tells about labels.

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
        try:
            counts = [self._count(_value(part, self.path)) for part in parts]
        except RuntimeError:  # a dtype that is not compared or summed
            return None
        known = [count for count in counts if count is not None]
        if not known or len(known) < len(counts):
            return None
        return torch.cat(known)

    def _count(self, value: Any) -> Tensor | None:
        if self.per_class:
            return _weighed(value, self.per_class)
        return _unpadded(value) if self.unpadded else _counted(value, self.ignored)

    def likely(self, parts: Sequence[Any]) -> bool:
        """Tell whether a loss may well ignore this label here: 0 is one like the others, unless it pads."""
        if self.ignored != 0:
            return True
        values = [_value(part, self.path) for part in parts]
        return all(_is_plain(value) and value.ndim > 1 and _pads(value.flatten(1) != 0) for value in values)


def counts_in(
    part: Any,
    *,
    whole: Collection[str] = (),
    per_sample: Collection[str] = (),
    hints: Hints = Hints(),  # noqa: B008  (immutable)
) -> list[Count]:
    """List the counts that a micro-batch has.

    Args:
        part: a micro-batch, or a batch.
        whole: paths that are kept whole.
        per_sample: paths of lists with one entry for each sample.
        hints: what the loss function tells about labels.

    Examples:
        >>> found = counts_in({"x": -torch.rand(2, 3), "mask": torch.ones(2, 3), "y": torch.tensor([1, 2])})
        >>> [str(count) for count in found]
        ["'mask'", "'y' (without -100)", "'y' (without -1)", "'y' (without 0)", "'y'"]
    """
    found: list[Count] = []
    with contextlib.suppress(ValueError, TypeError, RuntimeError):  # what cannot be walked is not counted
        for leaf in leaves(part, whole=whole, per_sample=per_sample):
            if leaf.length is not None:
                found += _of_leaf(leaf.path, _value(part, leaf.path), hints)
    return found


def uneven(counts: Sequence[Count], parts: Sequence[Any]) -> Iterator[tuple[Count, Tensor]]:
    """Yield the counts that are not the same for all samples, with their values.

    Labels are looked through once for the smallest: mostly it is larger than any that may be ignored.
    """
    path, low, high = None, 0.0, 0.0
    for count in counts:
        if count.ignored is not None or count.per_class:
            if count.path != path:
                path, (low, high) = count.path, _bounds(parts, count.path)
            if low == high or (count.ignored is not None and not low <= count.ignored <= high):
                continue
        values = count.of(parts)
        if values is not None and bool((values != values[0]).any()):
            yield count, values


def contrast(counts: Tensor) -> float:
    """Return the relative difference of the mean counts before and behind the check's cut, at a third.

    Examples:
        >>> contrast(torch.tensor([2.0, 4.0, 4.0]))
        0.5
    """
    cut = -(-len(counts) // 3)
    if not 0 < cut < len(counts):
        return 0.0
    first, rest = float(counts[:cut].mean()), float(counts[cut:].mean())
    return abs(first - rest) / max(first, rest) if max(first, rest) > 0 else 0.0


def extremes(counts: Tensor, rows: int) -> list[int]:
    """Return the samples that count least and most, in increasing order, so that every cut tells them apart.

    Samples that count nothing are left out where others differ: a mean over nothing is not a number.

    Examples:
        >>> extremes(torch.tensor([3.0, 1.0, 0.0, 2.0, 9.0]), 2)
        [1, 4]
    """
    order = [int(place) for place in torch.argsort(counts, stable=True)]
    some = [place for place in order if counts[place] > 0]
    if some and counts[some[0]] < counts[some[-1]]:
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


def _pads(kept: Tensor) -> bool:
    """Whether nothing is kept behind the first that is not kept, and more than one is not in some row."""
    return bool((kept[:, 1:] <= kept[:, :-1]).all()) and not bool(kept[:, -2:].any(1).all())


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
    """What one entry of a list counts: the rows of its first array."""
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
    return (weights[labels.clamp(0, len(per_class) - 1)] * known).sum(1)


def _unpadded(value: Any) -> Tensor | None:
    """The share of each row without the entries at its end, or at its start, that are all the same."""
    if not _is_plain(value) or value.ndim != 2 or value.shape[1] < 3:
        return None
    value, width = value.detach(), value.shape[1]
    first, last = value[:, :1], value[:, -1:]
    ends = torch.cat([value[:, 1:2] == first, value[:, -2:-1] == last])
    if not bool(ends.any()):  # mostly: no second look
        return torch.ones(len(value), dtype=torch.float64)
    behind = (value != last).flip(1).int().argmax(1)  # 0 where all are the same: nothing is known of them
    before = (value != first).int().argmax(1)
    most = torch.maximum(behind, before)
    low, high = value.aminmax()  # a label that pads is none of the others: smaller or larger
    pads = torch.where(behind > before, last[:, 0], first[:, 0])
    chance = (float(high) - float(low) + 1) ** (1.0 - most)  # of so many alike labels in a row
    padded = (chance < _BY_CHANCE) & ((pads == low) | (pads == high))
    return 1 - torch.where(padded, most, 0).cpu().double() / width


def _bounds(parts: Sequence[Any], path: str) -> tuple[float, float]:
    """The smallest and the largest label of some micro-batches."""
    try:  # mostly of tensors alone: without a call of ours for each micro-batch
        key = int(path) if type(parts[0]) is tuple else path
        values = list(map(itemgetter(key), parts))
        if len(values) > 1:
            values = [torch.cat(values if values[0].ndim == 1 else list(map(torch.flatten, values)))]
        low, high = values[0].aminmax()
        return low.item(), high.item()
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        each = [value.aminmax() for part in parts if _is_plain(value := _value(part, path))]
        lowest = min((low.item() for low, _ in each), default=math.inf)
        return lowest, max((high.item() for _, high in each), default=math.inf)
