"""Reductions of the outputs of micro-batches: sums, extremes, moments, concatenated rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .shard import BatchSlice, Shard, join


class Sums:
    """Sum of each output; 16-bit outputs are accumulated in float32 and rounded once, in `result`.

    Examples:
        >>> sums = Sums()
        >>> for index in range(2):
        ...     sums.add(BatchSlice(index, index, index + 1), [torch.ones(2)])
        >>> sums.result()
        [tensor([2., 2.])]
    """

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._dtypes: list[torch.dtype] = []

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        """Add the outputs of a micro-batch; an output that no operation reads is None."""
        if not self._sums:
            # `result` returns the dtype of the outputs: a bfloat16 loss stays bfloat16 for the program.
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
    # A copy, because the next outputs are added in place: elements of an expanded output share memory, and
    # an output that is a view of an input would change the input.
    return output.clone(memory_format=torch.contiguous_format)


class Folded:
    """Reduction with an associative function of two tensors, such as `torch.maximum` or `torch.mul`."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._combine = combine
        self._total: Tensor | None = None

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        """Combine the output of a micro-batch with the total."""
        (output,) = outputs
        self._total = output if self._total is None else self._combine(self._total, output)

    def result(self) -> list[Tensor]:
        """Return the total."""
        assert self._total is not None
        return [self._total]


class Extremes:
    """Minimum and maximum, for aminmax, which returns both."""

    def __init__(self) -> None:
        self._found: list[Tensor] | None = None

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        """Reduce the (minimum, maximum) of a micro-batch."""
        if self._found is None:
            self._found = outputs
        else:
            self._found = [
                # torch.minimum and maximum propagate NaN, as aminmax of the whole batch does.
                torch.minimum(self._found[0], outputs[0]),
                torch.maximum(self._found[1], outputs[1]),
            ]

    def result(self) -> list[Tensor]:
        """Return minimum and maximum over all samples."""
        assert self._found is not None
        return self._found


class Joined:
    """Concatenation of the rows of all micro-batches to a full tensor."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._rows: dict[int, Tensor] = {}

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        """Store the rows of a micro-batch."""
        # By number: a sweep may begin with the last micro-batch (see `run.carried`).
        self._rows[microbatch.number] = outputs[0]

    def result(self) -> list[Tensor]:
        """Return the rows in the order of the samples."""
        return [join([self._rows[number] for number in sorted(self._rows)], self._shard)]


class First:
    """Outputs that are equal in every micro-batch, such as the empty statistics of BatchNorm in eval mode."""

    def __init__(self) -> None:
        self._outputs: list[Any] | None = None

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        """Keep the outputs of the first micro-batch."""
        if self._outputs is None:
            self._outputs = outputs

    def result(self) -> list[Tensor]:
        """Return the outputs of the first micro-batch."""
        assert self._outputs is not None
        return self._outputs


class Moments:
    r"""Mean and sum of squared deviations over all samples, combined from those of micro-batches.

    ``mean = sum n_i mean_i / n`` and ``M2 = sum [M2_i + n_i |mean_i - mean|^2]``.

    Args:
        finish: computes the outputs from (mean, M2, n).

    Examples:
        >>> moments = Moments(lambda mean, squares, count: [mean, squares / count])
        >>> for index, x in enumerate([torch.tensor([1.0, 2.0]), torch.tensor([6.0])]):
        ...     deviations = (x - x.mean()).square().sum()
        ...     moments.add(BatchSlice(index, 0, len(x)), [(x.mean(), deviations, len(x))])
        >>> moments.result()
        [tensor(3.), tensor(4.6667)]

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
    (1979).
    """

    def __init__(self, finish: Callable[[Tensor, Tensor, int], Sequence[Tensor]]) -> None:
        self._finish = finish
        self._moments: list[tuple[Tensor, Tensor, int]] = []

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        """Add (mean, M2, count) of a micro-batch: its first output. Other outputs are placeholders."""
        self._moments.append(outputs[0])
        # Combined in between, so that a thousand micro-batches take no more memory than 32.
        if len(self._moments) == _MOST_HELD:
            self._moments = [_combined(self._moments)]

    def result(self) -> list[Tensor]:
        """Return `finish` of the moments over all samples."""
        return list(self._finish(*_combined(self._moments)))


_MOST_HELD = 32


def _combined(moments: Sequence[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor, int]:
    count = sum(n for _, _, n in moments)
    # Not sum x^2 - n mean^2, which cancels: a mean of 1e4 and a deviation of 1 leave no digit in float32.
    mean = sum_of(mean * (n / count) for mean, _, n in moments)
    squares = sum_of(squares + n * _squared(mean_i - mean) for mean_i, squares, n in moments)
    return mean, squares, count


def _squared(deviation: Tensor) -> Tensor:
    """Return ``|d|^2``, which is real for complex deviations too, as torch.var is."""
    return (deviation.abs() if deviation.is_complex() else deviation).square()


def sum_of(tensors: Any) -> Tensor:
    """Return the sum of one or more tensors."""
    total: Tensor | None = None
    for tensor in tensors:
        total = tensor if total is None else total + tensor
    assert total is not None
    return total
