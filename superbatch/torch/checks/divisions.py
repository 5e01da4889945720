"""Divisors of a loss, read from its autograd graph: numbers of entries of means, and explicit divisors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MEAN = 1  # torch's number for reduction="mean"


class Division(NamedTuple):
    """Number that a loss was divided by.

    Attributes:
        operator: name of the node in the graph.
        number: number of entries of a mean, or the divisor.
        sure: `number` is the number of entries of a mean; an explicit divisor may be anything.
        counted: divisor of a mean that ignores or weights entries; None: `number`.
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
    """Return the divisions between a loss and the last tensors with several elements in its graph.

    An accuracy that is computed beside the loss is not in its graph.

    Examples:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> [division.number for division in divisions_of(x.mean() + x.mean(1).mean() + x.sum() / 4)]
        [4.0, 2.0, 6.0]
    """
    found: list[Division] = []
    nodes, visited = [loss.grad_fn], set[Any]()
    while nodes:
        # A division of a tensor with several elements belongs to the model, not to the averaging of the loss.
        node = nodes.pop()
        if node is None or node in visited or not _makes_one_number(node):
            continue
        visited.add(node)
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
        one: divisions of the loss of one sample.
        two: divisions for two samples of that length.
        other: divisions for two samples of another length.
        lengths: for each leaf that has lengths, the two lengths.

    Examples:
        >>> means = [[Division("mean", number, sure=True)] for number in (3.0, 6.0, 10.0)]
        >>> entries_per_sample(*means, [(3, 5)])
        3.0
        >>> entries_per_sample(means[0], means[0], means[2], [(3, 5)]) is None
        True
    """
    # The graph depends on the length, so the divisors cannot be paired.
    if not len(one) == len(two) == len(other):
        return None
    for single, pair, far in zip(one, two, other, strict=True):
        # A divisor that a second sample does not increase is no count, e.g. a temperature.
        if not single.operator == pair.operator == far.operator or not single.number < pair.number:
            continue
        if pair.number != far.number and (pair.sure or any(_follows(pair, far, *both) for both in lengths)):
            return pair.number / 2
    return None


def ratios(one: Sequence[Division], two: Sequence[Division], other: Sequence[Division]) -> list[float]:
    """Return, for each divisor that grows with the samples, the ratio of its values for two sample lengths.

    Args:
        one: divisions of the loss of one sample.
        two: divisions for that sample twice.
        other: divisions for a sample of another length, twice.

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
        # The sample twice must give twice the divisor, which excludes a bound such as clamp(min=1).
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
            # Which of the two is saved depends on the release of torch.
            entries = getattr(node, "_saved_self_sym_numel", None)
            yield Division(
                name, float(node._saved_self_sym_sizes.numel() if entries is None else entries), sure=True
            )
        elif name.startswith("DivBackward"):
            divisor = torch.as_tensor(node._saved_other).detach()
            if divisor.numel() == 1 and not divisor.is_complex():
                yield Division(name, float(divisor), sure=False)
        elif getattr(node, "_saved_reduction", None) == _MEAN:
            if "Nll" in name:  # divides by the class weights of the labels that are not ignored
                entries, total = node._saved_target.numel(), float(node._saved_total_weight)
                yield Division(name, float(entries), sure=True, counted=total)
            else:
                yield Division(name, float(node._saved_self.numel()), sure=True)
    except (AttributeError, RuntimeError):  # this release of torch saves nothing, or another attribute
        return


def _follows(pair: Division, far: Division, length: int, other: int) -> bool:
    """Return whether two divisors are proportional to two lengths, or to the lengths minus one number."""
    proportional = pair.number * other == far.number * length
    return proportional or pair.number / 2 - length == far.number / 2 - other
