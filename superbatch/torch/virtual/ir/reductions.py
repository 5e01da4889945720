"""Reductions of the results of micro-batches to one: sums, extremes, moments, concatenated rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, Part, join


class Sums:
    """Adds up each output. Sums of 16-bit numbers are kept in float32 and rounded once.

    Examples:
        >>> sums = Sums()
        >>> for index in range(2):
        ...     sums.add(Part(index, index, index + 1), [torch.ones(2)])
        >>> sums.result()
        [tensor([2., 2.])]
    """

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._dtypes: list[torch.dtype] = []

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Add the outputs of a micro-batch; None stands for one that is not wanted."""
        if not self._sums:
            self._dtypes = [output.dtype if output is not None else torch.float32 for output in outputs]
            self._sums = [None if output is None else _first(output) for output in outputs]
            return
        for total, output in zip(self._sums, outputs, strict=True):
            if output is not None:
                total.add_(output)

    def result(self) -> list[Any]:
        """Return the sums."""
        return [
            None if total is None else total.to(dtype)
            for total, dtype in zip(self._sums, self._dtypes, strict=True)
        ]


def _first(output: Tensor) -> Tensor:
    if output.dtype in (torch.float16, torch.bfloat16):
        return output.float()
    # Later ones are added in place: an expanded or shared tensor would be written many times, or elsewhere.
    return output.clone(memory_format=torch.contiguous_format)


class Folded:
    """Combines pairwise: `torch.maximum`, `torch.mul`, `torch.logical_or`, ..."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._combine = combine
        self._total: Tensor | None = None

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Combine with what there is."""
        (output,) = outputs
        self._total = output if self._total is None else self._combine(self._total, output)

    def result(self) -> list[Tensor]:
        """Return the combination."""
        assert self._total is not None
        return [self._total]


class Extremes:
    """The smallest and the largest: two outputs."""

    def __init__(self) -> None:
        self._found: list[Tensor] | None = None

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Compare with what there is."""
        if self._found is None:
            self._found = outputs
        else:
            self._found = [
                torch.minimum(self._found[0], outputs[0]),
                torch.maximum(self._found[1], outputs[1]),
            ]

    def result(self) -> list[Tensor]:
        """Return both."""
        assert self._found is not None
        return self._found


class Joined:
    """Puts the rows together again: a gathered value."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pieces: dict[int, Tensor] = {}

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Take the rows of a micro-batch."""
        self._pieces[part.number] = outputs[0]

    def result(self) -> list[Tensor]:
        """Return all rows."""
        return [join([self._pieces[number] for number in sorted(self._pieces)], self._layout)]


class First:
    """Outputs that are the same for every micro-batch, such as empty placeholders."""

    def __init__(self) -> None:
        self._outputs: list[Any] | None = None

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Keep those of the first micro-batch."""
        if self._outputs is None:
            self._outputs = outputs

    def result(self) -> list[Tensor]:
        """Return them."""
        assert self._outputs is not None
        return self._outputs


class Moments:
    r"""Mean and sum of squared deviations over all samples, from those of micro-batches.

    ``mean = sum n_i mean_i / n`` and ``M2 = sum [M2_i + n_i |mean_i - mean|^2]``: nothing is lost to
    cancellation, as it would be in ``sum x^2 - n mean^2``. Some are combined at a time, so that those of a
    thousand micro-batches take no more memory than those of a few.

    Args:
        finish: makes the outputs of (mean, M2, n).

    Examples:
        >>> moments = Moments(lambda mean, squares, count: [mean, squares / count])
        >>> for index, x in enumerate([torch.tensor([1.0, 2.0]), torch.tensor([6.0])]):
        ...     deviations = (x - x.mean()).square().sum()
        ...     moments.add(Part(index, 0, len(x)), [(x.mean(), deviations, len(x))])
        >>> moments.result()
        [tensor(3.), tensor(4.6667)]

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
    (1979).
    """

    def __init__(self, finish: Callable[[Tensor, Tensor, int], Sequence[Tensor]]) -> None:
        self._finish = finish
        self._parts: list[tuple[Tensor, Tensor, int]] = []

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Take (mean, sum of squared deviations, count), which is the first output, whatever the others."""
        self._parts.append(outputs[0])
        if len(self._parts) == _AT_A_TIME:
            self._parts = [_combined(self._parts)]

    def result(self) -> list[Tensor]:
        """Return the result of `finish` for the moments of all samples."""
        return list(self._finish(*_combined(self._parts)))


_AT_A_TIME = 32


def _combined(parts: Sequence[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor, int]:
    count = sum(n for _, _, n in parts)
    mean = sum_of(mean * (n / count) for mean, _, n in parts)
    squares = sum_of(squares + n * _squared(mean_i - mean) for mean_i, squares, n in parts)
    return mean, squares, count


def _squared(deviation: Tensor) -> Tensor:
    """``|d|^2``, which is real for complex numbers too."""
    return (deviation.abs() if deviation.is_complex() else deviation).square()


def sum_of(tensors: Any) -> Tensor:
    """Return the sum of tensors, at least one."""
    total: Tensor | None = None
    for tensor in tensors:
        total = tensor if total is None else total + tensor
    assert total is not None
    return total
