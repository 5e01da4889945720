"""Divisors of a loss, read from its graph: entries of means, and explicit divisors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MEAN = 1  # torch's number for reduction="mean"


class Division(NamedTuple):
    """A number that a loss was divided by.

    Attributes:
        operator: name of the node in the graph.
        number: entries of a mean, or the divisor.
        sure: it is the number of entries of a mean; a divisor may be anything.
        counted: divisor of a mean that leaves entries out or weighs them; None: `number`.
    """

    operator: str
    number: float
    sure: bool
    counted: float | None = None

    @property
    def divisor(self) -> float:
        """Number that the loss was divided by."""
        return self.number if self.counted is None else self.counted


def divisions_of(loss: Tensor) -> list[Division]:
    """Return the divisions between a loss and the last tensors of several elements in its graph.

    Values computed beside the loss, such as an accuracy, are not in its graph.

    Examples:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> [division.number for division in divisions_of(x.mean() + x.mean(1).mean() + x.sum() / 4)]
        [4.0, 2.0, 6.0]
    """
    found: list[Division] = []
    nodes, known = [loss.grad_fn], set[Any]()
    while nodes:
        # A division of a tensor of several elements belongs to the model, not to the loss's average.
        node = nodes.pop()
        if node is None or node in known or not _makes_one_number(node):
            continue
        known.add(node)
        found += _divisions(node)
        nodes += [after for after, _ in node.next_functions]
    return found


def entries_per_sample(
    one: Sequence[Division],
    two: Sequence[Division],
    other: Sequence[Division],
    lengths: Sequence[tuple[int, int]],
) -> float | None:
    """Return the entries of a sample in a mean over all entries; None for a mean over samples.

    Args:
        one: of a loss of one sample.
        two: of two samples of that length.
        other: of two samples of another length.
        lengths: the two lengths, of each leaf that has them.

    Examples:
        >>> means = [[Division("mean", number, sure=True)] for number in (3.0, 6.0, 10.0)]
        >>> entries_per_sample(*means, [(3, 5)])
        3.0
        >>> entries_per_sample(means[0], means[0], means[2], [(3, 5)]) is None
        True
    """
    # Another graph for another length: the divisors do not pair up.
    if not len(one) == len(two) == len(other):
        return None
    for single, pair, far in zip(one, two, other, strict=True):
        # A divisor that does not grow with a second sample counts no samples, e.g. a temperature.
        if not single.operator == pair.operator == far.operator or not single.number < pair.number:
            continue
        if pair.number != far.number and (pair.sure or any(_follows(pair, far, *both) for both in lengths)):
            return pair.number / 2
    return None


def ratios(one: Sequence[Division], two: Sequence[Division], other: Sequence[Division]) -> list[float]:
    """Return how much a sample of one length counts to one of another, by each divisor that counts samples.

    Args:
        one: of a loss of one sample.
        two: of that sample twice.
        other: of a sample of another length, twice.

    Examples:
        >>> means = [[Division("mean", number, sure=True)] for number in (3.0, 6.0, 10.0)]
        >>> ratios(*means)
        [0.6]
    """
    if not len(one) == len(two) == len(other):
        return []
    return [
        pair.divisor / far.divisor
        for single, pair, far in zip(one, two, other, strict=True)
        if single.operator == pair.operator == far.operator
        # Twice the sample must give twice the divisor; a bound such as clamp(min=1) does not.
        and pair.divisor == 2 * single.divisor > 0
        and far.divisor > 0
    ]


def _makes_one_number(node: Any) -> bool:
    metadata = getattr(node, "_input_metadata", ())  # a node's gradient has the shape of its result
    return len(metadata) > 0 and torch.Size(metadata[0].shape).numel() == 1


def _divisions(node: Any) -> Iterator[Division]:
    name = node.name()
    try:
        if name.startswith("MeanBackward"):
            # The release of torch decides which of the two is saved.
            entries = getattr(node, "_saved_self_sym_numel", None)
            yield Division(
                name, float(node._saved_self_sym_sizes.numel() if entries is None else entries), sure=True
            )
        elif name.startswith("DivBackward"):
            divisor = torch.as_tensor(node._saved_other).detach()
            if divisor.numel() == 1 and not divisor.is_complex():
                yield Division(name, float(divisor), sure=False)
        elif getattr(node, "_saved_reduction", None) == _MEAN:
            if "Nll" in name:  # its divisor leaves out labels to ignore, and has the weights of classes
                entries, total = node._saved_target.numel(), float(node._saved_total_weight)
                yield Division(name, float(entries), sure=True, counted=total)
            else:
                yield Division(name, float(node._saved_self.numel()), sure=True)
    except (AttributeError, RuntimeError):  # nothing was saved, or in another form
        return


def _follows(pair: Division, far: Division, length: int, other: int) -> bool:
    """Return whether the divisors have the ratio of the lengths, or are both less by the same number."""
    proportional = pair.number * other == far.number * length
    return proportional or pair.number / 2 - length == far.number / 2 - other
